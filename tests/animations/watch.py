"""Plays a scene without writing anything and notes every text on the stage, frame by frame."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from manim import Scene, Text, Typst, VMobject, tempconfig

from animations.stage import SMALL


@dataclass(frozen=True)
class Seen:
    """A text at a moment: its words ("" for a formula), its edges in manim units, its font size."""

    time: float
    words: str
    left: float
    right: float
    bottom: float
    top: float
    size: float


def watch(scene: type[Scene], media: Path, *, frame_rate: int = 2) -> tuple[Scene, list[list[Seen]]]:
    """The played scene and, for each frame, the texts that are visible in it."""
    frames: list[list[Seen]] = []

    class Watched(scene):
        def update_to_time(self, t: float) -> None:
            super().update_to_time(t)
            frames.append(seen(self))

        def play(self, *args, **kwargs) -> None:
            super().play(*args, **kwargs)
            frames.append(seen(self))

    small = {"frame_rate": frame_rate, "pixel_width": 192, "pixel_height": 108}
    with tempconfig(small | {"dry_run": True, "media_dir": str(media), "progress_bar": "none"}):
        played = Watched()
        played.render()
    return played, frames


def seen(scene: Scene) -> list[Seen]:
    return [
        Seen(scene.time, getattr(m, "original_text", ""), m.get_left()[0], m.get_right()[0], m.get_bottom()[1], m.get_top()[1], m.font_size)
        for m in scene.get_mobject_family_members()
        if isinstance(m, (Text, Typst)) and opacity(m) > 0.1
    ]


def opacity(mobject: VMobject) -> float:
    return max((part.get_fill_opacity() for part in mobject.family_members_with_points()), default=0.0)


def overlaps(a: Seen, b: Seen, slack: float = 0.02) -> bool:
    """Whether two texts share more than a hair of the frame."""
    return min(a.right, b.right) - max(a.left, b.left) > slack and min(a.top, b.top) - max(a.bottom, b.bottom) > slack


def faults(frames: list[list[Seen]]) -> list:
    """What a viewer could not read: texts outside the safe frame, texts that are too small, pairs that cover each other."""
    out: list = []
    for frame in frames:
        out += [t for t in frame if max(abs(t.left), abs(t.right)) > 0.92 * 64 / 9 or max(abs(t.bottom), abs(t.top)) > 3.68]
        out += [t for t in frame if t.size < SMALL - 0.01]
        out += [(a, b) for a, b in combinations(frame, 2) if overlaps(a, b)]
    return out


def words(frames: list[list[Seen]]) -> str:
    """Everything that was ever to be read, once each."""
    return "\n".join(dict.fromkeys(t.words for frame in frames for t in frame))


def numbers(frames: list[list[Seen]]) -> set[str]:
    """Every number with a decimal point that was ever shown."""
    return set(re.findall(r"-?\d[\d,]*\.\d+", words(frames)))
