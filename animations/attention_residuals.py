"""The residuals scene: one blended pile, or weights over what came before.

    manim -ql animations/attention_residuals.py AttentionResiduals

A teacher's own correction, through the environment (a day of the meeting vocabulary; the scene and its numbers follow):

    K3_UPDATE="Friday" manim -ql animations/attention_residuals.py AttentionResiduals

In Python: a subclass with ``story = residuals_story(...)``. Where its query is "chosen", the learned one follows; else it stands alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Arrow, Line, Rectangle, VGroup

from animations.charts import Box, Edges, Texts, appear, vanish
from animations.stage import SAFE, SMALL, THEME, Formula, Label, StageScene, swap
from k3viz import residuals_story
from k3viz.residuals.story import TEXT, ResidualsStory
from k3viz.theme import ROLES, format_number, format_probability
from minimodel.tasks import meeting

READ = ((None, 'h = inline(scripts(sum)_i) "softmax"_i ('), ("query", "w^top"), ("key", '"RMSNorm"(v_i)'), (None, ")"), ("value", "v_i"))
TOP, BOTTOM, FORMULA = 2.15, -0.35, -1.3  # middles of the highest and the lowest source, the equation
LEFT, PILE, RIGHT = -5.0, 0.2, 4.6  # middles of the sources, the pile and the reader


def story_from_environment():
    """The residuals story with a query chosen for the article's shares; K3_UPDATE is the day that the meeting moves to, where it is set."""
    days, text = meeting.SLOTS["day"], TEXT
    if day := os.environ.get("K3_UPDATE", "").rpartition(":")[2].strip():
        if day not in days:
            raise ValueError(f"K3_UPDATE must be a day, one of {', '.join(days)}, got {day!r}")
        update = meeting.ARTICLE[1]
        text = text.replace(update, update.replace(next(d for d in days if d in update), day))
    return residuals_story(query="chosen", text=text)


def sentence_of(story: ResidualsStory) -> str:
    """The sentence with the word looked at, as it stands in the text; an open one ends in a blank."""
    ends = [-1, *(i for i, word in enumerate(story.tokens) if word == "."), len(story.tokens)]
    start, end = next((a + 1, b) for a, b in zip(ends, ends[1:], strict=False) if story.token <= b)
    return " ".join(story.tokens[start:end]) + ("." if end < len(story.tokens) else f" {meeting.BLANK}.")


class AttentionResiduals(StageScene):
    """One blended pile, or weights: a late layer asks all earlier outputs and takes what it needs from each."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        reader, word, n = story.readers[story.reader], story.tokens[story.token], len(story.row)
        ys = np.linspace(BOTTOM, TOP, n)  # the oldest source is the lowest
        height = min(0.7, 0.8 * (TOP - BOTTOM) / max(n - 1, 1))
        sources = [Box(name, x=LEFT, y=y, width=3.0, height=height) for name, y in zip(story.row_names, ys, strict=True)]
        middle = (TOP + BOTTOM) / 2
        target = Box(reader, "reads here", x=RIGHT, y=middle, width=3.2, height=1.1, fill=ROLES["query"])
        said = VGroup()

        self.next_section("question")
        self.ask("A deep model adds every layer to one stream.", "Can a late layer still find what an early one put in?")

        self.next_section("pile")
        opening = self.read(sentence_of(story), {word: "query"})
        source = self.cite("A trained small K3 reads the meeting notes. Equation: K3 report, Eq. 8 and 9")
        numbers = Texts([(LEFT + 1.65, y) for y in ys])
        pile, joints = self.pile(story.plain_row, middle)
        plain = Edges([(LEFT + 2.8, y) for y in ys], [(PILE - 0.55, y) for y in joints], color=ROLES["additive"], thickest=0.05)
        pour = Arrow([PILE + 0.5, middle, 0], [RIGHT - 1.6, middle, 0], buff=0.1, color=THEME.line, stroke_width=6)
        title = VGroup(Label("Plain sum: one pile", size=SMALL).at(PILE - 1.2, TOP + 0.52))
        self.play(opening, appear(*sources, source), self.say(f"At the word {word!r}: what the layers below have put out so far."))
        self.wait(1.2)
        smallest = int(story.plain_row.argmin())
        name, least = story.row_names[smallest], format_probability(story.plain_row[smallest])
        self.play(appear(pile, pour, target, title), plain.show([1] * n), self.say(
            f"A plain sum adds everything with weight 1. Of this pile, {the(name)} is {least}, and no layer can ask for more."),
            numbers.show([format_probability(x) for x in story.plain_row]))  # fmt: skip
        self.wait(3.2)

        self.next_section("query")
        formula = Formula(READ, {"query": "query", "key": "key", "value": "value"}, {"query": "query", "key": "key", "value": "value"},
                          x=-SAFE[0], y=FORMULA)  # fmt: skip
        self.play(vanish(pile, pour, plain), numbers.show([""] * n), swap(title, Label("Weights", size=SMALL).at(LEFT + 1.65, TOP + 0.52)),
                  appear(formula),
                  self.say("Attention Residuals: each reader has a query of its own. It scores all earlier outputs."))  # fmt: skip
        self.play(formula.light("query", "key"))
        self.wait(1.6)
        edges = Edges([(LEFT + 2.8, y) for y in ys], [(RIGHT - 1.6, middle + 0.2 * (i - (n - 1) / 2)) for i in range(n)],
                      color=ROLES["value"], thickest=0.42)  # fmt: skip

        if story.asked is not None:
            self.next_section("chosen")
            shares = " / ".join(map(format_number, story.row))
            self.play(formula.light("value"), edges.show(story.row), numbers.show([format_number(x) for x in story.row]), self.say(
                f"Chosen, not learned: a query that was solved for the weights {shares} at this word."))  # fmt: skip
            self.play(swap(said, self.next_word("chosen query", story.answer)))
            self.wait(2.6)

        self.next_section("learned")
        own = story.query == "learned" or story.asked is not None
        weights, answer = (story.learned_row, story.learned_answer) if own else (story.row, story.answer)
        how = "Learned: the same reader with the query that training gave it" if own else "A zero query, as training starts, averages"
        self.play(formula.light("value"), edges.show(weights), numbers.show([format_number(x) for x in weights]),
                  swap(said, self.next_word("learned query" if own else "zero query", answer)), self.say(f"{how}."))  # fmt: skip
        self.wait(2.4)

        self.next_section("answer")
        most = int(np.argmax(weights))
        self.play(formula.light(), self.say(
            f"Not one blended pile: each reader weighs all earlier outputs, anew at every word. Most here: "
            f"{the(story.row_names[most])}, {format_number(weights[most])}.", bold=True))  # fmt: skip
        self.wait(4.5)

    def pile(self, shares: np.ndarray, middle: float) -> tuple[VGroup, list[float]]:
        """The plain sum as one stack, each source as high as its part of the length, and the middles of the parts."""
        tall, y, parts, joints = TOP - BOTTOM, middle - (TOP - BOTTOM) / 2, VGroup(), []
        for i, share in enumerate(shares):
            part = Rectangle(width=1.1, height=max(tall * share, 1e-3), stroke_width=0)
            parts.add(part.set_fill(ROLES["additive"], 1 - 0.35 * (i % 2)).move_to([PILE, y + tall * share / 2, 0]))
            parts.add(Line([PILE - 0.55, y, 0], [PILE + 0.55, y, 0], color=THEME.paper, stroke_width=2))
            joints.append(y + tall * share / 2)
            y += tall * share
        return parts, joints

    def next_word(self, how: str, answer: tuple[str, float]) -> VGroup:
        lines = (Label(f"next word, {how}:", size=SMALL), Label(f"{answer[0]} ({format_probability(answer[1])})", size=SMALL, bold=True))
        return VGroup(*(line.at(RIGHT - 2.75, -0.25 - 0.45 * i) for i, line in enumerate(lines)))


def the(source: str) -> str:
    return f"the {source}" if source == "embedding" else source
