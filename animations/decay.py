"""Two scenes about forgetting: one speed against 128 dials, and a gate with and without a floor.

    manim -ql animations/decay.py DecayDials
    manim -ql animations/decay.py BoundedDecay

K3_TEXT is the note that is read: words of the course's meeting vocabulary, in ``DecayDials`` up to three lines with at least one fact.
K3_HALF_LIFE is the single dial's half-life in words. In Python: a subclass with ``story = decay_story(...)``, for ``BoundedDecay`` with
``story = chunks_story(...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
import torch
from manim import Create, FadeIn, FadeOut, VGroup, linear

from animations.charts import Bars
from animations.grids import Dials, Grid, Note, Plot
from animations.stage import SAFE, SMALL, THEME, Formula, Label, StageScene, swap
from k3viz import chunks_story, decay_story
from k3viz.chunks.story import ChunksStory, power
from k3viz.decay.story import DecayStory, equal_dial, log_decay, tokens_text
from k3viz.theme import ROLES, format_probability
from minimodel import load_pretrained

UPPER, LOWER, TALL = 1.68, -0.3, 1.45  # upper edges of the two maps, their height
MAP, WIDE, BARS = -3.35, 4.55, 3.6  # left edge and width of the maps, left ends of the bars
SHOWN = 4  # facts that get a bar of their own
POOL = 4


def story_from_environment() -> DecayStory:
    """The by-hand decay story with the text in K3_TEXT and the single dial's half-life in K3_HALF_LIFE, where they are set."""
    settings = {}
    if text := os.environ.get("K3_TEXT"):
        settings["text"] = text
    if half_life := os.environ.get("K3_HALF_LIFE"):
        try:
            settings["one_half_life"] = float(half_life)
        except ValueError:
            raise ValueError(f"K3_HALF_LIFE must be a number of words, got {half_life!r}") from None
    return decay_story(**settings)


class DecayDials(StageScene):
    """One speed of forgetting loses the facts or keeps the filler too; 128 dials, one a channel, tell them apart."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        facts = [i for i, fact in enumerate(story.facts) if fact]
        if not 0 < len(facts) < len(story.facts):
            raise ValueError(f"text: this scene needs words that state facts and words that don't, got {story.text!r}")
        named = list({story.tokens[i]: i for i in reversed(facts)}.values())[::-1][:SHOWN]  # the first mention of each word
        lives = story.half_lives(-1)
        slow = decay_story(text=story.text, gate=story.gate, shift=story.shift, one_half_life=equal_dial(story))
        learned = decay_story(text=story.text, model=load_pretrained())
        learned = decay_story(text=story.text, model=load_pretrained(), one_half_life=equal_dial(learned))

        self.next_section("question")
        self.ask(f"A note of {len(story.tokens)} words, a few of them facts.", "How fast should a memory forget?")

        self.next_section("one dial")
        note = Note(story.tokens, story.facts, x=-SAFE[0], y=SAFE[1] - 0.25, width=2 * SAFE[0])
        if note.height > 1.3:
            raise ValueError(f"text: this scene has room for three lines, got {len(story.tokens)} words")
        titles = VGroup(VGroup(), VGroup())
        source, one_map, one_bars, names = self.foot("hand"), self.map(story, UPPER), self.bars(UPPER, len(named)), self.names(story, named)
        one_dial = Dials(np.array([story.one_half_life]), columns=1, left=-SAFE[0] + 0.75, top=UPPER + 0.05, pitch=1.46)
        ends = VGroup(Label("slow", size=SMALL).at(-SAFE[0], UPPER - 1.2), Label("fast", size=SMALL).at(-SAFE[0] + 2.25, UPPER - 1.2))
        ends.add(Label("down: channels, across: words", size=SMALL, color=THEME.muted).at(1.2, UPPER + 0.33))
        self.add(titles, source)
        self.play(
            FadeIn(note, one_dial, ends, one_map, names[0], one_bars), swap(titles[0], self.title(story, UPPER, one=True)),
            self.say("One dial: every channel fades at the same speed. Facts are bold."),
        )  # fmt: skip
        self.play(note.run(run_time=5), one_map.run(self.inks(story, one=True), run_time=5))
        self.play(self.fill(one_bars, story, named, one=True), self.say(self.kept_text(story)))
        self.wait(1.8)

        self.next_section("one slow dial")
        self.play(
            one_dial.show(np.array([slow.one_half_life])), swap(titles[0], self.title(slow, UPPER, one=True)),
            self.say("The same dial, set to keep as much of the facts as will be needed below."),
        )  # fmt: skip
        self.play(note.run(run_time=2.5), one_map.run(self.inks(slow, one=True), run_time=2.5))
        self.play(self.fill(one_bars, slow, named, one=True), self.say(self.kept_text(slow)))
        self.wait(1.6)

        self.next_section("many dials")
        many_map, many_bars = self.map(story, LOWER), self.bars(LOWER, len(named))
        dials = Dials(lives, columns=16, left=-SAFE[0], top=LOWER, pitch=TALL / 8)
        self.play(
            FadeIn(dials, many_map, names[1], many_bars),
            swap(titles[1], self.title(story, LOWER)),
            self.say("A dial a channel: facts use slow channels, other words fast ones."),
        )
        self.play(note.run(run_time=5), many_map.run(self.inks(story), run_time=5))
        self.play(
            self.fill(many_bars, story, named),
            self.say(f"As much of the facts is kept; of the rest {self.others(story)} instead of {self.others(slow, one=True)}."),
        )
        self.wait(2)

        self.next_section("trained")
        self.play(
            self.say("A trained head with the dials that it learned, and one dial set to keep as much of the facts."), FadeOut(source)
        )
        source = self.foot("learned")
        self.play(
            FadeIn(source), dials.show(learned.half_lives(-1)), one_dial.show(np.array([learned.one_half_life])),
            one_map.show(self.inks(learned, one=True)[-1]), many_map.show(self.inks(learned)[-1]),
            swap(titles[0], self.title(learned, UPPER, one=True)), swap(titles[1], self.title(learned, LOWER)),
            self.fill(one_bars, learned, named, one=True), self.fill(many_bars, learned, named),
        )  # fmt: skip
        self.wait(2.5)

        self.next_section("answer")
        (many, one), (many_learned, one_learned) = (
            (self.others(told), self.others(beside, one=True)) for told, beside in ((story, slow), (learned, learned))
        )
        answer = f"Facts kept alike, {len(lives)} dials hold {many} of the other words, one dial {one}"
        self.play(self.say(f"{answer}; in the trained head {many_learned} and {one_learned}.", bold=True))
        self.wait(4.5)

    def inks(self, story: DecayStory, *, one: bool = False) -> np.ndarray:
        """[T, K/POOL, T]: what stands of each word in each channel, of the most that is left anywhere at the end.

        POOL neighboring channels share a row, which shows the largest: a row of one pixel can't be seen.
        """
        ink = np.abs(story.one_ink if one else story.ink)
        T, K, _ = ink.shape
        return ink.reshape(T, K // POOL, POOL, T).max(2) / max(np.abs(x[-1]).max() for x in (story.ink, story.one_ink))

    def map(self, story: DecayStory, top: float) -> Grid:
        return Grid(0 * self.inks(story)[0], limit=1, left=MAP, top=top, width=WIDE, height=TALL)

    def title(self, story: DecayStory, top: float, *, one: bool = False) -> VGroup:
        lives = story.half_lives(-1)
        ends = f"{tokens_text(lives.min())} to {tokens_text(lives.max())}"
        words = f"One dial: half-life {tokens_text(story.one_half_life)} words" if one else f"{len(lives)} dials: half-lives {ends} words"
        return VGroup(Label(words, size=SMALL).at(-SAFE[0], top + 0.33))

    def bars(self, top: float, facts: int) -> Bars:
        colors = [ROLES["value"]] * facts + [THEME.muted]
        return Bars(self.heights(top, facts), left=BARS, unit=1.55, colors=colors, height=0.22)

    def names(self, story: DecayStory, named: list[int]) -> tuple[VGroup, VGroup]:
        """What each bar stands for, for both rows of the picture."""
        words = [*(story.tokens[i] for i in named), "other words"]
        return tuple(
            VGroup(*(Label(word, size=SMALL, bold=word != "other words").at(MAP + WIDE + 0.2, y)
                     for word, y in zip(words, self.heights(top, len(named)), strict=True))) for top in (UPPER, LOWER)
        )  # fmt: skip

    def heights(self, top: float, facts: int) -> list[float]:
        return [top - 0.08 - 0.335 * i for i in range(facts + 1)]

    def fill(self, bars: Bars, story: DecayStory, named: list[int], *, one: bool = False):
        """The bars go to what is kept of the named facts and, on average, of the other words."""
        kept = story.kept(-1, one=one)
        values = [float(kept[i]) for i in named]
        texts = [*map(format_probability, values), self.others(story, one=one)]
        return bars.show([*values, story.kept_by_kind(-1, one=one)[1]], texts)

    def kept_text(self, story: DecayStory) -> str:
        """What the single dial keeps at the end, in words."""
        facts, others = map(format_probability, story.kept_by_kind(-1, one=True))
        return f"Half-life {tokens_text(story.one_half_life)} words: {facts} of the facts are left, and {others} of the other words."

    def others(self, story: DecayStory, *, one: bool = False) -> str:
        """How much of the words that state no fact is kept, on average."""
        return format_probability(story.kept_by_kind(-1, one=one)[1])

    def foot(self, kind: str) -> Label:
        if kind == "hand":
            return self.cite("Dials as K3 starts them; keys chosen by hand. Equation: K3 report, Eq. 1")
        return self.cite("Computed by the trained meeting model: its own dials, keys, write strengths")


def tile_from_environment() -> ChunksStory:
    """The chunk story of the trained model with the text in K3_TEXT, where it is set."""
    return chunks_story(text=text) if (text := os.environ.get("K3_TEXT")) else chunks_story()


class BoundedDecay(StageScene):
    """The old gate lets one step forget without limit; K3's has a floor, and sixteen steps of it always fit float32."""

    story = None

    def construct(self) -> None:
        story = self.story or tile_from_environment()
        if story.gate != "bounded" or story.shift or story.numbers != "float32":
            raise ValueError("story: this scene compares the two gates itself, give a bounded one in float32 without a shift")
        if -story.bound * story.chunk > story.limit:
            raise ValueError(f"story: {story.chunk} words a chunk at g > {story.bound:g} don't fit {story.numbers}, give a smaller chunk")
        text = " ".join(story.tokens)
        other = chunks_story(text=text, head=story.place, chunk=story.chunk, gate="softplus")
        n, floor = min(story.chunk, len(story.tokens)), story.bound
        bound = f"−{-floor:g}"

        self.next_section("question")
        self.ask("A dial can be turned up and up.", "How much may one step forget?")

        self.next_section("one step")
        z = torch.linspace(-6, 12, 73, dtype=torch.float64)
        curves = {gate: log_decay(z[None], 0.0, gate, floor)[0].numpy() for gate in ("softplus", "bounded")}
        left = Plot((-6, 12), (2.4 * floor, 0), left=-5.55, right=-0.6, bottom=-1.45, top=2.0)
        old = Formula(((None, "g = -e^A"), ("gate", 'op("softplus")(z)')), {"gate": "additive"}, {"gate": "Kimi Linear"}, x=-SAFE[0], y=3.2)
        new = Formula(((None, f"g = -{-floor:g}"), ("gate", "sigma(e^A z)")), {"gate": "decay"}, {"gate": "K3: bounded"}, x=0.6, y=3.2)
        labels = VGroup(
            left.ticks((0, floor, 2 * floor), ("0", bound, f"−{-2 * floor:g}")),
            Label("log-decay g of one step, over the dial z", size=SMALL).at(-SAFE[0], -1.78),
        )
        source = self.cite(f"Trained meeting model, layer {story.place[0] + 1}, head {story.place[1] + 1}. K3 report, Eq. 5; curves: A = 0")
        names = [Label(words, size=SMALL) for words in ("Kimi Linear", "K3")]
        names[0].at(left.at(8.6, 0)[0] - names[0].width, left.at(0, curves["softplus"][int((z < 9.5).sum())])[1])
        names[1].at(left.at(9.5, 0)[0], left.at(0, floor)[1] + 0.28)
        soft = left.curve(z, curves["softplus"], THEME.muted, dashed=True)
        self.play(FadeIn(left, labels, old, source), self.say("Kimi Linear's gate has no floor: turn the dial up and g falls and falls."))
        self.play(old.light("gate"), Create(soft), FadeIn(names[0]), run_time=2.5)
        self.wait(1)
        level = left.mark(floor, ROLES["decay"])
        least = format_probability(float(np.exp(floor)))
        self.play(old.light(), FadeIn(new), self.say(f"K3's gate ends at {bound}: a step keeps at least e^{bound} = {least}."))
        self.play(
            new.light("gate"), FadeIn(level), Create(left.curve(z, curves["bounded"], ROLES["decay"])), FadeIn(names[1]), run_time=2.5
        )
        self.wait(2)

        self.next_section("a tile of steps")
        top = max(1.25 * story.limit, float(other.reach[:n].max()) * 1.05)
        right = Plot((0, n), (0, top), left=1.35, right=6.2, bottom=-1.45, top=2.0)
        self.play(
            new.light(), FadeIn(right, Label(f"sum of −g over the first {n} words", size=SMALL).at(0.75, -1.78)),
            self.say(f"A tile takes {n} words as matrix products. They need e to the power of the sum."),
        )  # fmt: skip
        self.wait(1.2)
        end = right.mark(story.limit, ROLES["erase"])
        ends = right.ticks((0, story.limit), ("0", power(story.limit)))
        foot, height = right.at(0, 0)[1], right.at(0, story.limit)[1]
        # between the two curves; where the old one dwarfs them, beside it
        name = Label("float32 ends", size=SMALL).at(*((4.1, height - 0.27) if height > foot + 1 else (2.2, height + 0.25)))
        self.play(FadeIn(end, ends, name), self.say(f"float32 holds numbers up to e^{power(story.limit)}."))
        self.wait(0.8)
        steps = np.arange(n + 1)
        sums = {told.gate: np.concatenate([[0.0], told.reach[:n]]) for told in (story, other)}
        last = {gate: Label(f"e^{power(x[-1])}", size=SMALL, bold=True) for gate, x in sums.items()}
        for gate, term, words in (("softplus", old, "The model's own dials through the old gate: the sum leaves float32."),
                                  ("bounded", new, f"Through its own: never above {n} × {-floor:g} = {-n * floor:g}.")):  # fmt: skip
            if gate == "softplus" and sums[gate][-1] <= story.limit:
                words = "The model's own dials through the old gate. Nothing keeps the sum in float32."
            look = {"color": THEME.muted, "dashed": True} if gate == "softplus" else {"color": ROLES["decay"]}
            line = right.curve(steps, sums[gate], **look)
            height = right.at(0, sums[gate][-1])[1]
            below = gate == "bounded" and height - 0.75 > foot + 0.2  # a low curve leaves no room under it
            last[gate].at(SAFE[0] - last[gate].width, height - 0.75 if below else height + 0.22)
            self.play(term.light("gate"), self.say(words))
            self.play(Create(line, rate_func=linear), run_time=2.5)
            self.play(FadeIn(last[gate]), term.light(), run_time=0.6)
            self.wait(1.2)

        self.next_section("answer")
        broken = int(np.isnan(other.errors).sum())
        without = (
            f"Without it, {broken} of {len(story.tokens)} outputs are not numbers." if broken else "Without it, nothing promises that."
        )
        self.play(self.say(f"With the floor, a tile of {n} words always fits float32. {without}", bold=True))
        self.wait(4.5)
