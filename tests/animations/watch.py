"""Plays a scene without writing anything and notes every text on the stage, frame by frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manim import Scene, Text, Typst, VMobject, tempconfig


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
