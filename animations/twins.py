"""The same conversation, twice: a twin with a notebook in every layer, and Kimi Linear with a whiteboard in most of them.

    manim -ql animations/twins.py SameConversationTwice

K3_CONTEXT sets how long the conversation gets, in tokens (default: 1,048,576). In Python: a subclass with
``story = twins_story(context=...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

from manim import FadeIn, Line, Rectangle, VGroup

from animations.charts import Texts
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene, coming, leaving
from k3viz import memory_story
from k3viz.memory.story import MemoryStory
from k3viz.theme import MIXER_COLORS, format_bytes, format_count, format_probability
from minimodel.facts import KimiLinear
from minimodel.tasks import meeting

TWIN, HYBRID = "kimi_linear_mla", "kimi_linear"
CONTEXT, FIRST = 1_048_576, 4096  # tokens: where the conversation ends, and what the first scale holds
GROUND, TALL, WIDE = -1.05, 3.0, 1.5  # of the columns
COLUMNS = {"twin": -4.35, "board": 0.6, "book": 4.6}


def twins_story(*, context: int = CONTEXT) -> MemoryStory:
    """Kimi Linear 48B and the same model with MLA in every layer, at ``context`` tokens."""
    return memory_story(kinds=(), models=(TWIN, HYBRID), context=context)


def story_from_environment() -> MemoryStory:
    """``twins_story`` for a conversation of K3_CONTEXT tokens."""
    text = os.environ.get("K3_CONTEXT", str(CONTEXT))
    if not text.strip().isdecimal() or int(text) <= FIRST:
        raise ValueError(f"K3_CONTEXT must be a whole number of tokens above {FIRST}, got {text!r}")
    return twins_story(context=int(text))


class Column(VGroup):
    """A memory as a column, with its bytes above and two lines of words below; a notebook's has pages, a whiteboard's is plain."""

    def __init__(self, words: tuple[str, str], *, x: float, color: str, pages: bool):
        self.x, self.height_now, self.number = x, 0.0, VGroup()
        self.bar = Rectangle(width=WIDE, height=1e-3, stroke_width=0, fill_color=color, fill_opacity=1).move_to([x, GROUND, 0])
        ys = (GROUND + 0.15 * i for i in range(1, int(TALL / 0.15) + 1 if pages else 1))
        self.pages = [Line([x - WIDE / 2, y, 0], [x + WIDE / 2, y, 0], color=THEME.paper, stroke_width=2, stroke_opacity=0) for y in ys]
        labels = [Label(line, size=SMALL) for line in words]
        self.words = VGroup(*(label.at(x - label.width / 2, GROUND - 0.3 - 0.42 * i) for i, label in enumerate(labels)))
        super().__init__(self.bar, *self.pages, self.words)

    def show(self, height: float, written: str) -> tuple:
        """(update, done) of a ``Change``: the column's height and the number above it."""
        start, self.height_now, old = self.height_now, height, self.number
        same = getattr(old, "text", "") == written
        new = self.number = old if same else Label(written, size=SMALL).set_opacity(0)
        self.add(new)

        def update(alpha: float) -> None:
            tall = max(start + alpha * (height - start), 1e-3)
            self.bar.stretch_to_fit_height(tall).move_to([self.x, GROUND + tall / 2, 0])
            for page in self.pages:
                page.set_stroke(opacity=float(page.get_y() < GROUND + tall))
            for label in (old, new):
                if len(label):
                    label.at(self.x - label.width / 2, GROUND + tall + 0.25)
            if not same:
                old.set_opacity(leaving(alpha))
                new.set_opacity(coming(alpha))

        return update, lambda: None if same else self.remove(old)


class SameConversationTwice(StageScene):
    """The same conversation, twice: the notebook's memory climbs with every token, the whiteboard's never moves."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        twin, hybrid = (next(c for c in story.published if c.name == name) for name in (TWIN, HYBRID))
        layers = {"twin": twin.layers, "board": twin.layers - hybrid.layers, "book": hybrid.layers}
        even = hybrid.bill.break_even
        stops = [(FIRST // 16, FIRST), (even, FIRST), (FIRST, FIRST)] if even < FIRST else [(FIRST // 16, FIRST), (FIRST, FIRST)]
        middle = round((FIRST * story.context) ** 0.5)
        stops += [(middle, middle), (story.context, story.context)]

        self.next_section("question")
        self.ask(meeting.ARTICLE[0], "The same conversation, read by two models: whose memory climbs?")

        self.next_section("start")
        words = {
            "twin": ("a notebook", f"in {layers['twin']} layers"),
            "board": ("a whiteboard", f"in {layers['board']} layers"),
            "book": ("a notebook", f"in {layers['book']} layers"),
        }
        color = {"twin": MIXER_COLORS["mla"], "board": MIXER_COLORS["kda"], "book": MIXER_COLORS["mla"]}
        columns = {name: Column(words[name], x=x, color=color[name], pages=name != "board") for name, x in COLUMNS.items()}
        titles = VGroup(*(Label(text, size=SMALL, bold=True) for text in ("Twin: MLA everywhere", "Kimi Linear: KDA and MLA")))
        titles[0].at(COLUMNS["twin"] - titles[0].width / 2, 2.85)
        titles[1].at((COLUMNS["board"] + COLUMNS["book"]) / 2 - titles[1].width / 2, 2.85)
        ground = Line([-SAFE[0], GROUND, 0], [SAFE[0], GROUND, 0], color=THEME.line, stroke_width=2)
        between = Line([-2.0, 3.0, 0], [-2.0, -1.9, 0], color=THEME.line, stroke_width=2)
        counter = Texts([(-SAFE[0], 3.4)], bold=True)
        source = self.cite("By formula on Kimi Linear 48B's released sizes, bfloat16, states float32")
        instead = f"Kimi Linear has whiteboards in {layers['board']} of its layers instead"
        start = self.say(f"The twin writes every token into {layers['twin']} notebooks. {instead}.")
        self.play(FadeIn(*columns.values(), titles, ground, between, counter, source), start)
        self.wait(1.6)
        said = {
            even: f"At {format_count(even)} tokens both keep the same. Before, the whiteboards cost more; from here on they win.",
            FIRST: f"The whiteboards have not moved: {format_bytes(hybrid.fixed)}, whatever was said.",
            middle: f"Zoomed out to {format_count(middle)} tokens: beside the notebooks, the whiteboards are a thin line.",
        }
        for tokens, scale in stops:
            self.next_section(f"{tokens} tokens")
            unit = TALL / (twin.fixed + scale * twin.per_token)
            amounts = {"twin": twin.fixed + tokens * twin.per_token, "board": hybrid.fixed, "book": tokens * hybrid.per_token}
            changes = [columns[name].show(amount * unit, format_bytes(amount)) for name, amount in amounts.items()]
            count = counter.show([f"{format_count(tokens)} tokens read"])
            moves = [Change(columns[name], update, done) for name, (update, done) in zip(amounts, changes, strict=True)]
            self.play(*moves, count, *([self.say(said[tokens])] if tokens in said else []), run_time=2)
            self.wait(2.4 if tokens in said else 0.6)

        self.next_section("answer")
        saved = 1 - hybrid.bytes[-1] / twin.bytes[-1]
        less = f"{format_bytes(hybrid.bytes[-1])} instead of {format_bytes(twin.bytes[-1])}, {format_probability(saved)} less"
        self.play(self.say(f"{less}. Published: up to {100 * KimiLinear.kv_cache_saving.value:.0f} %."))
        self.wait(2.6)
        board = f"The whiteboard's never moves: {format_bytes(hybrid.fixed)} from first to last"
        self.play(self.say(f"The notebook's memory climbs with every token. {board}.", bold=True))
        self.wait(4.5)
