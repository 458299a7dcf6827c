"""The memory bill: every token pays in every layer and for every head, until the chip is full.

    manim -ql animations/memory_bill.py MemoryBill

K3_CHIP sets the chip's memory in GB (default 141): K3_CHIP=80 manim -ql animations/memory_bill.py MemoryBill
In Python: a subclass with ``story = bill_story(memory=...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import (
    RESAMPLING_ALGORITHMS,
    FadeIn,
    FadeOut,
    Group,
    ImageMobject,
    Line,
    ManimColor,
    Rectangle,
    RoundedRectangle,
    SurroundingRectangle,
    VGroup,
)

from animations.charts import Bars, Texts
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene
from k3viz import memory_story
from k3viz.memory.story import MemoryStory
from k3viz.theme import MIXER_COLORS, format_bytes, format_count
from minimodel.tasks import meeting

CHIP = 141  # GB, chosen: what one accelerator of 2025 holds
MODELS = {"k3_mha": "MHA: a copy a head", "k3_gqa": "GQA: {} copies", "k3_all_mla": "MLA: latent cards", "k3": "K3: KDA and MLA"}
TOP, BOTTOM = 2.45, -1.2
NAMES, AMOUNTS = -1.75, 3.7  # edges of the two columns of text


def bill_story(*, memory: float = CHIP * 1e9) -> MemoryStory:
    """K3's sizes with four kinds of attention, on a chip of ``memory`` bytes."""
    return memory_story(kinds=(), models=tuple(MODELS), memory=memory)


def story_from_environment() -> MemoryStory:
    """``bill_story`` for a chip of K3_CHIP GB."""
    text = os.environ.get("K3_CHIP", str(CHIP))
    try:
        return bill_story(memory=1e9 * float(text))
    except ValueError:
        raise ValueError(f"K3_CHIP must be the chip's memory in GB, a number above 0, got {text!r}") from None


class HeadGrid(Group):
    """A cell for each head of each layer, a row a layer; the first ``pay(n)`` cells are filled, row by row from the top."""

    def __init__(self, layers: int, heads: int, *, left: float, top: float, size: float, color: str):
        self.shape, self.paid = (layers, heads), 0
        self.colors = np.array([ManimColor(c).to_rgb() * 255 for c in (THEME.empty, color)])
        self.image = ImageMobject(self._pixels(0))
        self.image.set_resampling_algorithm(RESAMPLING_ALGORITHMS["nearest"])
        self.image.stretch_to_fit_height(size).stretch_to_fit_width(size).move_to([left + size / 2, top - size / 2, 0])
        super().__init__(self.image, SurroundingRectangle(self.image, buff=0, color=THEME.line, stroke_width=2))

    def pay(self, cells: int, *, run_time: float = 1.0) -> Change:
        """Fill up to so many cells."""
        before, self.paid = self.paid, cells

        def update(alpha: float) -> None:
            self.image.pixel_array = self._pixels(round(before + alpha * (cells - before)))

        return Change(self, update, run_time=run_time)

    def _pixels(self, cells: int) -> np.ndarray:
        paid = (np.arange(self.shape[0] * self.shape[1]) < cells).astype(int).reshape(self.shape)
        return np.dstack([self.colors[paid], np.full(self.shape, 255)]).round().astype(np.uint8)


class Chip(VGroup):
    """A chip that fills from below, in shares of its memory."""

    def __init__(self, words: str, *, left: float, right: float, top: float, bottom: float, color: str):
        self.bottom, self.tall, self.share = bottom, top - bottom, 0.0
        middle = (left + right) / 2
        case = RoundedRectangle(corner_radius=0.1, width=right - left, height=self.tall, stroke_color=THEME.ink, stroke_width=3)
        self.fill = Rectangle(width=right - left - 0.1, height=1e-3, stroke_width=0, fill_color=color, fill_opacity=0)
        ys = np.linspace(bottom + 0.3, top - 0.3, 8)
        pins = (Line([x, y, 0], [x + d, y, 0], color=THEME.ink, stroke_width=3) for x, d in ((left, -0.14), (right, 0.14)) for y in ys)
        label = Label(words, size=SMALL)
        super().__init__(*pins, case.move_to([middle, (top + bottom) / 2, 0]), self.fill, label.at(middle - label.width / 2, bottom - 0.35))
        self.middle = middle

    def load(self, share: float, *, run_time: float = 1.0) -> Change:
        """Fill a share of the memory."""
        before, self.share = self.share, share

        def update(alpha: float) -> None:
            height = max((before + alpha * (share - before)) * self.tall, 1e-3)
            self.fill.stretch_to_fit_height(height).move_to([self.middle, self.bottom + height / 2, 0])
            self.fill.set_fill(opacity=float(height > 1e-3))

        return Change(self, update, run_time=run_time)


class MemoryBill(StageScene):
    """The bill: every token pays in every layer for every head, until the chip is full; K3's size with four kinds of attention."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        curves = {c.name: c for c in story.published}
        mha, k3 = curves["k3_mha"], curves["k3"]
        each = mha.per_token // (mha.layers * mha.copies)
        chip = f"a chip of {format_bytes(story.memory)}"
        full = mha.fills(story.memory)

        self.next_section("question")
        self.ask("A model keeps numbers for every token it has read.", f"When is {chip} full?")

        self.next_section("one token")
        size = TOP - BOTTOM
        grid = HeadGrid(mha.layers, mha.copies, left=-SAFE[0], top=TOP, size=size, color=MIXER_COLORS["mha"])
        under = Label(f"{mha.layers} layers (rows) of {mha.copies} heads", size=SMALL).at(-SAFE[0], BOTTOM - 0.35)
        ys = [TOP - 0.2 - 0.55 * i for i in range(6)]
        names, amounts = Texts([(NAMES, y) for y in ys]), Texts([(AMOUNTS, y) for y in ys], right=True)
        source = self.cite("By formula on K3's released sizes, bfloat16; chip chosen, weights not counted")
        sentence = self.read(meeting.ARTICLE[1], {"Thursday": "value"})
        start = self.say("Take K3's size with plain attention. One token, Thursday, pays:")
        self.play(sentence, FadeIn(grid, under, names, amounts, source), start)
        heads = f"in {mha.copies} heads"
        pays = [("in one head of one layer", each), (heads, each * mha.copies), (f"in {mha.layers} layers", mha.per_token)]
        first = Rectangle(width=0.24, height=0.24, color=THEME.ink, stroke_width=3).move_to([-SAFE[0] + 0.02, TOP - 0.02, 0])
        self.add(first)
        for i, cells in enumerate((1, mha.copies, mha.layers * mha.copies)):
            rows = pays[: i + 1] + [("", 0)] * (5 - i)
            self.play(
                grid.pay(cells, run_time=(0.5, 1.0, 2.0)[i]), names.show([name for name, _ in rows]),
                amounts.show([format_bytes(n) if n else "" for _, n in rows]),
            )  # fmt: skip
            self.wait(0.9)
            self.remove(first)

        self.next_section("the chip")
        case = Chip(chip.removeprefix("a "), left=4.15, right=SAFE[0] - 0.35, top=TOP, bottom=BOTTOM, color=MIXER_COLORS["mha"])
        self.play(FadeIn(case), self.say("Every further token pays the same again, and nothing is given back."))
        stops = sorted({min(full, 1 << p) for p in range(10, full.bit_length() + 1)})[-4:]
        for tokens in stops:
            rows = [*pays, ("", 0), (f"{format_count(tokens)} tokens", tokens * mha.per_token), ("", 0)]
            self.play(
                case.load(tokens * mha.per_token / story.memory), names.show([name for name, _ in rows]),
                amounts.show([format_bytes(n) if n else "" for _, n in rows]), run_time=1.3,
            )  # fmt: skip
            self.wait(0.3)
        self.play(self.say(f"After {format_count(full)} tokens the chip is full. K3 is made to read {format_count(story.context)}."))
        self.wait(2.6)

        self.next_section("four kinds")
        self.play(FadeOut(grid, under, names, amounts, case, self.sentence))
        start, most = -2.4, max(c.fills(story.memory) for c in curves.values())
        lines = [TOP - 0.45 - 0.8 * i for i in range(len(curves))]
        ordered = [curves[name] for name in MODELS]
        title = Label(f"Tokens of one conversation that fill {chip}", size=SMALL).at(-SAFE[0], 3.3)
        kinds = VGroup(*(Label(MODELS[c.name].format(c.copies), size=SMALL).at(-SAFE[0], y) for c, y in zip(ordered, lines, strict=True)))
        unit = (SAFE[0] - 1.5 - start) / most
        bars = Bars(lines, left=start, unit=unit, colors=[MIXER_COLORS[c.mixer] for c in ordered], height=0.36)
        x, steps = start + story.context * unit, np.linspace(TOP, -1.15, 46)
        ends = [start + c.fills(story.memory) * unit for c in ordered]
        written = [y for y, end in zip(lines, ends, strict=True) if end < x + 0.1 and x < end + 1.6]  # where a number would be crossed
        dashes = ((a, b) for a, b in zip(steps[::2], steps[1::2], strict=True) if all(abs((a + b) / 2 - y) > 0.25 for y in written))
        line = VGroup(*(Line([x, a, 0], [x, b, 0], color=THEME.ink, stroke_width=3) for a, b in dashes))
        context = Label(f"K3's context: {format_count(story.context)} tokens", size=SMALL)
        self.play(FadeIn(title, kinds, bars), self.say("The same size with four kinds of attention:"))
        self.play(bars.show([c.fills(story.memory) for c in ordered], [format_count(c.fills(story.memory)) for c in ordered]), run_time=2)
        self.play(FadeIn(line, context.at(min(x - 0.2, SAFE[0] - context.width), -1.45)))
        self.wait(2.2)
        at = f"K3's hybrid keeps {format_bytes(k3.bytes[-1])} for all {format_count(story.context)}"
        self.play(self.say(f"Paid in every layer by every head, {format_count(full)} tokens fill the chip. {at}.", bold=True))
        self.wait(4.5)
