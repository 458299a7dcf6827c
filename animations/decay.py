"""Two scenes about forgetting: one speed against 128 dials, and a gate with and without a floor.

    manim -ql animations/decay.py DecayDials
    manim -ql animations/decay.py BoundedDecay

K3_TEXT is the note that is read, up to 40 words of the course's meeting vocabulary with at least one fact. K3_HALF_LIFE is the single
dial's half-life in words. In Python: a subclass with ``story = decay_story(...)``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import FadeIn, FadeOut, VGroup

from animations.charts import Bars
from animations.grids import Dials, Grid, Note
from animations.stage import SAFE, SMALL, THEME, Label, StageScene, swap
from k3viz import decay_story
from k3viz.decay.story import DecayStory, equal_dial, tokens_text
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
        settings["one_half_life"] = float(half_life)
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
        self.play(self.fill(one_bars, story, named, one=True), self.say("This speed has lost the facts. Only the last words are left."))
        self.wait(1.8)

        self.next_section("one slow dial")
        self.play(
            one_dial.show(np.array([slow.one_half_life])), swap(titles[0], self.title(slow, UPPER, one=True)),
            self.say("A slower dial keeps the facts, and everything else with them."),
        )  # fmt: skip
        self.play(note.run(run_time=2.5), one_map.run(self.inks(slow, one=True), run_time=2.5))
        self.play(self.fill(one_bars, slow, named, one=True))
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
        self.play(self.fill(many_bars, story, named), self.say("As much of the facts is kept, and far less of the rest."))
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
        answer = f"As much of the facts kept, and less of the rest: {many} instead of {one}"
        self.play(self.say(f"{answer}; in the trained head {many_learned} instead of {one_learned}.", bold=True))
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

    def others(self, story: DecayStory, *, one: bool = False) -> str:
        """How much of the words that state no fact is kept, on average."""
        return format_probability(story.kept_by_kind(-1, one=one)[1])

    def foot(self, kind: str) -> Label:
        if kind == "hand":
            return self.cite("Dials as K3 starts them; keys chosen by hand. Equation: K3 report, Eq. 1")
        return self.cite("Computed by the trained meeting model: its own dials, keys, write strengths")
