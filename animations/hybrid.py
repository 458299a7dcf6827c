"""Two scenes about the hybrid: what its layers keep, and one word's way through them to the next word.

    manim -ql animations/hybrid.py HybridStack
    manim -ql animations/hybrid.py InferencePath

The trained meeting model reads the notes and the question. K3_UPDATE is the day that the meeting moves to, or K3_TEXT another text for the
model, words of the meeting vocabulary in up to two lines. K3_CONTEXT is the length of K3's conversation in ``HybridStack``, in tokens. In
Python: a subclass with ``story = reading_story(...)``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import FadeIn, FadeOut, Group, Line, Rectangle, VGroup

from animations.charts import Bars, Texts
from animations.grids import Grid, Note
from animations.stage import SAFE, SMALL, THEME, Change, Label, StageScene, legend, mix
from k3viz import hybrid_story
from k3viz.hybrid.reading_story import TEXT, LayerReading, ReadingStory, reading_story
from k3viz.theme import MIXER_COLORS, ROLES, format_bytes, format_count, format_number, format_probability, text_on
from minimodel.tasks import meeting

MIXERS = {"kda": "KDA", "mla": "Gated MLA"}
CONTEXT = 131_072  # tokens
POOL = 4
STACK, PITCH, SIZE = -1.4, 1.05, 0.92  # middle of the lowest row, from row to row, size of a state
WIDE = 2.5  # width of a layer's name
GROUND, TALL = -1.5, 3.1  # foot and height of K3's columns


def story_from_environment() -> ReadingStory:
    """The trained model's reading of the text in K3_TEXT, or of the notes with the day in K3_UPDATE, where one of them is set."""
    if text := os.environ.get("K3_TEXT"):
        return reading_story(text=text)
    days, text, update = meeting.SLOTS["day"], TEXT, meeting.ARTICLE[1]
    if day := os.environ.get("K3_UPDATE", "").rpartition(":")[2].strip():
        if day not in days:
            raise ValueError(f"K3_UPDATE must be a day, one of {', '.join(days)}, got {day!r}")
        text = text.replace(update, update.replace(next(d for d in days if d in update), day))
    return reading_story(text=text)


def context_from_environment() -> int:
    """The tokens of K3's conversation: K3_CONTEXT where it is set."""
    text = os.environ.get("K3_CONTEXT", str(CONTEXT))
    if not text.strip().isdecimal() or not 10_000 <= int(text) <= 1 << 24:
        raise ValueError(f"K3_CONTEXT must be a whole number from 10000 to {1 << 24}, got {text!r}")
    return int(text)


def note_of(story: ReadingStory, bold: Sequence[bool]) -> Note:
    """The text at the head of the frame. ValueError if it needs more than two lines."""
    note = Note(story.tokens, bold, x=-SAFE[0], y=SAFE[1] - 0.25, width=2 * SAFE[0])
    if note.height > 0.9:
        raise ValueError(f"text: this scene has room for two lines, got {len(story.tokens)} words")
    return note


def loud(x: np.ndarray) -> float:
    """Where a map's full color lies: a few large numbers would leave the rest pale."""
    return float(np.quantile(np.abs(x), 0.99)) or 1.0


def coarse(states: np.ndarray) -> np.ndarray:
    """States [..., K, V] with POOL x POOL neighbors as one cell, which shows the largest: a cell of less than a pixel can't be seen."""
    *before, K, V = states.shape
    cells = states.reshape(*before, K // POOL, POOL, V // POOL, POOL).swapaxes(-2, -3).reshape(*before, K // POOL, V // POOL, -1)
    return np.take_along_axis(cells, np.abs(cells).argmax(-1, keepdims=True), -1)[..., 0]


class HybridStack(StageScene):
    """Three KDA layers that never grow, then one Gated MLA layer that keeps every word: a quarter of the growth."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        context, T = context_from_environment(), len(story.tokens)
        if len(story.layers) > 4:
            raise ValueError(f"story: there is room for 4 layers, got {len(story.layers)}")

        self.next_section("question")
        self.ask("A fixed state is small. Cards for every word lose nothing.", "Why not use both?")

        self.next_section("a small hybrid")
        note, rows = note_of(story, [False] * T), [self.row(layer, i) for i, layer in enumerate(story.layers)]
        names, pictures, runs = zip(*rows, strict=True)
        source = self.cite("Trained meeting model, its own states and cards; bytes measured in its cache")
        say = self.say("The course's trained model: KDA layers edit fixed states, the Gated MLA layer on top keeps cards.")
        self.play(FadeIn(note, *names, *pictures, source), say)
        self.wait(1.2)
        self.play(note.run(run_time=7), *(run(7) for run in runs))
        sizes = Texts([(3.15, STACK + PITCH * i) for i in range(len(story.layers))])
        self.add(sizes)
        kept = [self.kept_text(layer) for layer in story.layers]
        self.play(sizes.show(kept), self.say("After the last word: the states are as large as after the first, the cards have added up."))
        self.wait(2.4)

        self.next_section("K3")
        k3 = hybrid_story(scale="2.8T", lens="memory", tokens=context)
        layers = [step for step in k3.steps if step.number]
        mixers = [step.mixer for step in layers]
        memory = np.array([k3.cost(step) for step in layers], dtype=float)
        all_mla = hybrid_story(scale="2.8T", lens="memory", tokens=context, pattern="M")
        grown = np.array([all_mla.cost(step) for step in all_mla.steps if step.number], dtype=float)
        unit = TALL / max(memory.max(), grown.max())
        fixed = np.where(np.array(mixers) == "kda", memory, 0.0)  # what is kept before the first word
        columns = Columns([MIXER_COLORS[mixer] for mixer in mixers], unit)
        of = {mixer: mixers.count(mixer) for mixer in MIXERS}
        key = legend([(MIXER_COLORS[m], f"{n} {MIXERS[m]} layers") for m, n in of.items()], x=-SAFE[0], y=SAFE[1] - 0.25)
        title = Label(f"{k3.label}: what each of {len(layers)} layers keeps of one conversation", size=SMALL).at(-SAFE[0], SAFE[1] - 0.75)
        totals = Texts([(-SAFE[0], SAFE[1] - 1.25)], bold=True)
        self.play(
            FadeOut(note, *names, *pictures, sizes, source), self.say("K3 repeats the pattern: three KDA layers, one Gated MLA layer.")
        )
        columns.show(fixed).now()
        self.add(totals)
        source = self.cite(f"K3's published config, {format_count(context)} tokens; states float32, cards bfloat16")
        self.play(FadeIn(columns, key, title, source))
        self.wait(1.2)
        one = {m: format_bytes(float(memory[mixers.index(m)])) for m in MIXERS}
        self.play(columns.show(memory, run_time=4), self.say(f"In {format_count(context)} tokens a Gated MLA layer grows to {one['mla']}. "
                                                            f"A KDA layer stays at {one['kda']}."))  # fmt: skip
        self.play(totals.show([f"{format_bytes(memory.sum())} in all"]))
        self.wait(2.2)
        both = f"{format_bytes(memory.sum())} in all; {format_bytes(grown.sum())} with cards in every layer"
        self.play(columns.ghosts(grown), totals.show([both]), self.say("With Gated MLA everywhere, every layer would grow."), run_time=1.6)
        self.wait(2)

        self.next_section("answer")
        share = format_probability(of["mla"] / len(layers))
        self.play(self.say(f"{of['mla']} of {len(layers)} layers keep every word, {of['kda']} keep a fixed state: memory grows at "
                           f"{share} of the speed.", bold=True))  # fmt: skip
        self.wait(4.5)

    def row(self, layer: LayerReading, i: int):
        """(name, picture, a function that gives the change of reading the text) of one layer; the first layer is the lowest."""
        y = STACK + PITCH * i
        fill = MIXER_COLORS[layer.mixer]
        label = Label(f"{i + 1}: {MIXERS[layer.mixer]}", size=SMALL, color=text_on(fill)).at(-SAFE[0] + 0.12, y)
        box = Rectangle(width=WIDE, height=0.56, stroke_width=0, fill_color=fill, fill_opacity=1)
        name = VGroup(box.move_to([-SAFE[0] + WIDE / 2, y, 0]), label)
        if layer.states is not None:
            states = coarse(layer.states)
            maps = [Grid(0 * states[0, h], limit=loud(states[-1, h]), left=-3.8 + (SIZE + 0.15) * h, top=y + SIZE / 2,
                         width=SIZE, height=SIZE) for h in range(states.shape[1])]  # fmt: skip
            return name, Group(*maps), lambda t: _together([m.run(states[:, h], run_time=t) for h, m in enumerate(maps)])
        T, width = len(layer.cards), 6.5
        grid = Grid(0 * layer.cards.T, limit=loud(layer.cards), left=-3.8, top=y + SIZE / 2, width=width, height=SIZE)
        cards = np.stack([layer.cards.T * (np.arange(T) <= t) for t in range(T)])
        return name, grid, lambda t: grid.run(cards, run_time=t)

    @staticmethod
    def kept_text(layer: LayerReading) -> str:
        """What a layer keeps, as measured after the first and the last word."""
        first, last = int(layer.kept[0]), int(layer.kept[-1])
        return f"{format_bytes(last)}, from {format_bytes(first)}" if last > first else f"{format_bytes(last)}, always"


def _together(changes: Sequence[Change]) -> Change:
    """Several changes of the same length as one."""

    def update(alpha: float) -> None:
        for change in changes:
            change.update(alpha)

    both = Change(Group(*(change.mobject for change in changes)), update, run_time=changes[0].run_time)
    both.rate_func = changes[0].rate_func
    return both


class Columns(VGroup):
    """A column a layer, as high as what it keeps; hollow ones show what it would keep otherwise."""

    def __init__(self, colors: Sequence[str], unit: float):
        n = len(colors)
        self.unit, self.values, self.wide = unit, np.zeros(n), 2 * SAFE[0] / n
        self.xs = -SAFE[0] + self.wide * (np.arange(n) + 0.5)
        look = {"width": 0.75 * self.wide, "height": 1}
        self.hollow = VGroup(*(Rectangle(**look, stroke_color=THEME.line, stroke_width=1.5) for _ in colors)).set_opacity(0)
        self.full = VGroup(*(Rectangle(**look, stroke_width=0, fill_color=color, fill_opacity=1) for color in colors))
        ground = Line([-SAFE[0], GROUND, 0], [SAFE[0], GROUND, 0], color=THEME.line, stroke_width=2)
        super().__init__(self.hollow, self.full, ground)
        self._draw(self.full, self.values)

    def show(self, values: np.ndarray, *, run_time: float = 1.0) -> Change:
        old, self.values = self.values, values
        return Change(self, lambda alpha: self._draw(self.full, old + alpha * (values - old)), run_time=run_time)

    def ghosts(self, values: np.ndarray) -> Change:
        """Hollow columns grow behind the full ones."""
        old = self.values

        def update(alpha: float) -> None:
            self.hollow.set_stroke(opacity=min(1.0, 4 * alpha))
            self._draw(self.hollow, old + alpha * (values - old))

        return Change(self, update, run_time=1.6)

    def _draw(self, columns: VGroup, values: np.ndarray) -> None:
        for column, x, value in zip(columns, self.xs, values, strict=True):
            high = max(1e-3, value * self.unit)
            column.stretch_to_fit_height(high).move_to([x, GROUND + high / 2, 0])


class InferencePath(StageScene):
    """One word's way through the trained model: embedding, three KDA layers, one Gated MLA layer, and the next word."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        T, word = len(story.tokens), story.tokens[-1]
        steps = ["embedding", *(f"{i + 1}: {MIXERS[layer.mixer]}" for i, layer in enumerate(story.layers)), "output"]
        if len(steps) > 6:
            raise ValueError(f"story: there is room for 4 layers, got {len(story.layers)}")

        self.next_section("question")
        self.ask(f"The last word read is “{word}”.", "How does the model find the next word?")

        self.next_section("embedding")
        note = note_of(story, [False] * (T - 1) + [True])
        note.upto(T)
        tower = Tower(steps, ["", *(MIXER_COLORS[layer.mixer] for layer in story.layers), ""])
        source = self.cite("Recorded while the trained meeting model read this text")
        self.heading, self.said = Texts([(LEFT, 2.15)], bold=True), Texts([(LEFT, -1.75)])
        self.lines = Texts([(LEFT, 1.75), (LEFT, -0.2), (LEFT, -0.65), (LEFT, -1.1)])
        self.stage = Group(Grid(story.vector[None], limit=loud(story.vector), left=LEFT, top=1.47, width=10.1, height=0.5))
        self.add(self.heading, self.said, self.lines)
        self.play(FadeIn(note, tower, source), self.say("The word becomes a vector: one row of the embedding's table."))
        row = f"{len(story.vector)} numbers: row {story.token} of the table"
        self.play(tower.light(0), self.heading.show(["Embedding"]), self.lines.show([row, "", "", ""]), FadeIn(self.stage))
        self.play(self.reads(story.said))
        self.wait(2.2)

        for i, layer in enumerate(story.layers):
            self.next_section(f"layer {i + 1}")
            moe = f"experts {' and '.join(f'{e} ({format_number(w)})' for e, w in layer.experts)} of {layer.experts_of} work on it"
            rest = moe if layer.experts else "then a dense MLP"
            look = self.kda(layer) if layer.mixer == "kda" else self.mla(story, layer)
            picture, lines, words = look
            old, self.stage = self.stage, picture
            self.play(
                tower.light(i + 1), FadeOut(old), self.say(words),
                self.heading.show([f"Layer {i + 1}: {MIXERS[layer.mixer]} and {'experts' if layer.experts else 'a dense MLP'}"]),
                self.lines.show([*lines, rest]),
            )  # fmt: skip
            self.play(FadeIn(picture), self.reads(layer.said))
            self.wait(2.6)

        self.next_section("output")
        best = story.layers[-1].said
        bars = Bars([1.4 - 0.6 * i for i in range(len(best))], left=LEFT + 2.3, unit=5.0, colors=[ROLES["value"]] * len(best))
        names = VGroup(*(Label(w, size=SMALL).at(LEFT, y) for (w, _), y in zip(best, bars.ys, strict=True)))
        self.play(
            tower.light(len(steps) - 1), FadeOut(self.stage), self.heading.show(["Output: a probability for every word"]),
            self.lines.show([""] * 4), self.said.show([""]), self.say("The outputs of all layers are mixed and compared with every word."),
        )  # fmt: skip
        self.play(FadeIn(names, bars), bars.show([p for _, p in best], [format_probability(p) for _, p in best]))
        self.wait(2)

        self.next_section("answer")
        answer, p = story.answer
        first = next(i for i, layer in enumerate(story.layers) if layer.said[0][0] == answer)  # the last layer says it at the latest
        self.play(self.say(f"The blank is filled with {answer}, {format_probability(p)}. Read out layer by layer, it first shows "
                           f"behind layer {first + 1}.", bold=True))  # fmt: skip
        self.wait(4.5)

    def reads(self, said: tuple[tuple[str, float], ...]) -> Change:
        return self.said.show([f"Read out here, the model would say “{said[0][0]}”, {format_probability(said[0][1])}"])

    def kda(self, layer: LayerReading) -> tuple[Group, list[str], str]:
        heads, channels = layer.alpha.shape
        states = coarse(layer.states[-1])
        maps = [Grid(state, limit=loud(state), left=LEFT + 1.6 * h, top=1.47, width=1.35, height=1.35) for h, state in enumerate(states)]
        kept = Grid(layer.alpha, limit=1, left=LEFT + 1.6 * heads + 0.5, top=1.47, width=9.6 - 1.6 * heads, height=1.35)
        low, high = format_number(layer.alpha.min()), format_number(layer.alpha.max())
        lines = [
            f"left: the states of {heads} heads; right: what each channel keeps",
            f"each of {channels} channels keeps between {low} and {high}",
            f"the heads write with strength {' and '.join(format_number(b) for b in layer.beta)}",
        ]
        words = "KDA: fade the state, correct it, read it. The past is in the state."
        if layer.experts:
            words = f"Again, with states of its own. Then a router picks {len(layer.experts)} of {layer.experts_of} experts."
        return Group(*maps, kept), lines, words

    def mla(self, story: ReadingStory, layer: LayerReading) -> tuple[Group, list[str], str]:
        heads, T = layer.attention.shape
        shares = Grid(layer.attention, limit=float(layer.attention.max()), left=LEFT, top=1.47, width=10.1, height=1.35)
        looked = [(story.tokens[int(row.argmax())], format_probability(row.max())) for row in layer.attention]
        passes = " and ".join(format_probability(x) for x in layer.gate.mean(-1))
        lines = [
            f"how {heads} heads (down) look at the cards of {T} words",
            f"most at {' and '.join(f'“{word}” {share}' for word, share in looked)}",
            f"the gate lets {passes} of the heads pass",
        ]
        return Group(shares), lines, "Gated MLA: look at the card of every word, then a gate."


LEFT = -3.7  # left edge of what a layer does


class Tower(VGroup):
    """The model's steps, from the embedding below to the output above; the one that acts is filled."""

    def __init__(self, names: Sequence[str], fills: Sequence[str]):
        self.fills = [fill or ROLES["query"] for fill in fills]
        self.boxes, self.labels, self.lit = VGroup(), VGroup(), np.zeros(len(names))
        for i, name in enumerate(names):
            y = -1.7 + 0.76 * i
            box = Rectangle(width=WIDE, height=0.56, stroke_color=THEME.line, stroke_width=2, fill_color=THEME.empty, fill_opacity=1)
            label = Label(name, size=SMALL)
            self.boxes.add(box.move_to([-SAFE[0] + WIDE / 2, y, 0]))
            self.labels.add(label.at(-SAFE[0] + WIDE / 2 - label.width / 2, y))
        xs, gaps = -SAFE[0] + WIDE / 2, [(-1.7 + 0.76 * i + 0.28, -1.7 + 0.76 * (i + 1) - 0.28) for i in range(len(names) - 1)]
        links = VGroup(*(Line([xs, a, 0], [xs, b, 0], color=THEME.muted, stroke_width=3) for a, b in gaps))
        super().__init__(links, self.boxes, self.labels)

    def light(self, step: int) -> Change:
        old, self.lit = self.lit, np.eye(len(self.fills))[step]
        new = self.lit

        def update(alpha: float) -> None:
            for box, label, fill, amount in zip(self.boxes, self.labels, self.fills, old + alpha * (new - old), strict=True):
                box.set_fill(mix(THEME.empty, fill, amount))
                label.set_color(mix(THEME.ink, text_on(fill), amount))

        return Change(self, update, run_time=0.8)
