"""Films of the scenes: which scenes there are, rendering one unless it is up to date, and frames of what was rendered."""

from __future__ import annotations

import hashlib
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

from PIL import Image

import animations

ROOT = Path(animations.__file__).parent.parent
QUALITIES = ("low", "medium", "high")  # 480p15, 720p30, 1080p60
FORMATS = ("mp4", "gif", "webm", "png")


def scenes() -> dict[str, type]:
    """Every scene of this folder by its name, in the order of the files."""
    from animations.stage import StageScene

    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(animations.__path__) if not module.name.startswith("_")):
        module = import_module(f"animations.{name}")
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, StageScene) and thing.__module__ == module.__name__ != StageScene.__module__:
                found[thing.__name__] = thing
    return found


def source(scene: type) -> str:
    """The scene's file, from the top folder."""
    return Path(sys.modules[scene.__module__].__file__).relative_to(ROOT).as_posix()


def caption(scene: type) -> str:
    """What the scene shows, in a sentence."""
    return scene.__doc__.splitlines()[0]


def fingerprint() -> str:
    """Changes when the code, a trained model or a teacher's setting (K3_...) changes."""
    digest = hashlib.sha256()
    for folder in ("animations", "k3viz", "minimodel"):
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".json", ".safetensors"}):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    digest.update(repr(sorted(item for item in os.environ.items() if item[0].startswith("K3_"))).encode())
    return digest.hexdigest()


def render(scene: type, *, quality: str = "low", format: str = "mp4", force: bool = False) -> tuple[Path, bool]:
    """Render a scene into manim's media folder, unless the file there was made from the same code and settings.

    Returns the file, and whether it was up to date.
    """
    from manim import tempconfig

    settings = {
        "quality": f"{quality}_quality",
        "format": "mp4" if format == "gif" else format,
        "output_file": scene.__name__,
        "progress_bar": "display" if sys.stderr.isatty() else "none",
    }
    with tempconfig(settings):
        drawing = scene()
        made = Path(drawing.renderer.file_writer.output_plan.primary_artifact)
        path = made.with_suffix(f".{format}")
        stamp, now = path.with_name(path.name + ".stamp"), f"{fingerprint()} {quality}"
        if not force and path.exists() and stamp.exists() and stamp.read_text() == now:
            return path, True
        drawing.render()
    if format == "gif":
        write_gif(made, path)
    stamp.write_text(now)
    return path, False


def frames_of(film: Path) -> tuple[list[Image.Image], float]:
    """All frames of a film, and how many of them are a second."""
    import av

    with av.open(str(film)) as opened:
        return [frame.to_image() for frame in opened.decode(video=0)], float(opened.streams.video[0].average_rate)


def write_gif(film: Path, path: Path) -> None:
    """A film as a small gif: 7.5 pictures a second, one palette, no dithering (manim's own is about twenty times larger)."""
    frames, rate = frames_of(film)
    step = max(1, round(rate / 7.5))
    frames = frames[::step]
    width, height = frames[0].size
    samples = frames[:: max(1, len(frames) // 16)]
    column = Image.new("RGB", (width, height * len(samples)))
    for i, sample in enumerate(samples):
        column.paste(sample, (0, i * height))
    palette = column.quantize(96)
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=round(1000 * step / rate), loop=0)
