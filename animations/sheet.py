"""The contact sheet: first, middle and last frame of every scene; and docs/animations.md, which shows it with a still of each scene."""

from __future__ import annotations

import os
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from animations.films import ROOT, caption, frames_of, source
from k3viz.theme import LIGHT

PAGE = ROOT / "docs" / "animations.md"
IMAGES = ROOT / "docs" / "images"
THUMBNAIL, MARGIN, HEAD, COLUMNS = (284, 160), 12, 30, 2  # pixels; COLUMNS of scenes, three pictures each
BEGIN, END = "<!-- scenes: written by `python -m animations sheet --docs`, do not edit -->", "<!-- end of scenes -->"


def contact_sheet(films: dict[str, Path], path: Path) -> None:
    """Write a picture with three frames of every film under its name."""
    wide, high = 3 * THUMBNAIL[0] + 3 * MARGIN, THUMBNAIL[1] + HEAD + MARGIN
    rows = -(-len(films) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * wide + MARGIN, rows * high + MARGIN), LIGHT.empty)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=18)
    for i, (name, film) in enumerate(films.items()):
        x, y = MARGIN + i % COLUMNS * wide, MARGIN + i // COLUMNS * high
        frames, seconds = frames_of(film, lambda i, n: i in (0, n // 2, n - 1))
        draw.text((x, y), f"{name}, {seconds:.0f} s", fill=LIGHT.ink, font=font)
        for j, frame in enumerate(frames):
            sheet.paste(frame.resize(THUMBNAIL, Image.Resampling.LANCZOS), (x + j * (THUMBNAIL[0] + MARGIN), y + HEAD))
    _save(sheet, path)


def write_docs(scenes: dict[str, type], films: dict[str, Path]) -> None:
    """The sheet and the stills (last frames) into docs/images/, and the list of scenes into docs/animations.md."""
    contact_sheet(films, IMAGES / "scenes.png")
    for name, film in films.items():
        _save(frames_of(film, lambda i, n: i == n - 1)[0][0], IMAGES / f"scene_{name}.png")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    _replace(PAGE, f"{before}{BEGIN}\n{listed(scenes)}{END}{after}".encode())


def listed(scenes: dict[str, type]) -> str:
    """Every scene in markdown: its caption, the command that renders it, its last frame."""
    parts = []
    for name, scene in scenes.items():
        says = caption(scene)
        picture = f"![The last frame of {name}: {says}](images/scene_{name}.png)"
        parts.append(f"### {name}\n{says}\n\n`manim -ql {source(scene)} {name}`\n\n{picture}\n\n")
    return "".join(parts)


def _save(picture: Image.Image, path: Path) -> None:
    small = picture.quantize(96, dither=Image.Dither.NONE)
    partial = path.with_name(f".{path.name}.tmp")
    small.save(partial, format="PNG", optimize=True)
    os.replace(partial, path)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(content)
    os.replace(partial, path)
