"""The Gated MLA scene: a card for every note, heads that look cards up, a gate that lets out what was asked.

    manim -ql animations/gated_mla.py GatedMLA

K3_FACTS holds up to four notes, "row: word", separated by semicolons, and K3_UPDATE a correction, "row: word", or a word alone, which then
goes to the row of the last note (to the day where K3_FACTS is not set). In Python: a subclass with ``story = mla_story(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import FadeIn, Group, Rectangle, RoundedRectangle, VGroup

from animations.charts import Edges, Texts
from animations.grids import Grid
from animations.notes import notes_from_environment
from animations.stage import BODY, SAFE, SMALL, THEME, Change, Label, StageScene, legend, swap
from k3viz import mla_story
from k3viz.mla.story import NOTES, MLAStory
from k3viz.theme import ROLES, format_count, format_number, format_probability

CARDS, CARD, STRIP = 2.55, 1.62, 0.26  # upper edge and height of the cards, height of the latent numbers on them
HEADS, BARRIER, OUT = 0.12, -0.62, -1.62  # heights: the heads, their gates, what comes out
QUESTION = 1.66  # width of the question's card
READS = 0.005  # a head's share of a card that is drawn


def story_from_environment() -> MLAStory:
    """The by-hand Gated MLA story with the notes in K3_FACTS and the correction in K3_UPDATE, where they are set."""
    *notes, (row, word) = NOTES
    facts, update = notes_from_environment(row)
    update = update or (facts[-1][0] if facts else row, word)
    return mla_story(notes=(*(facts or notes), update), slot=update[0])


class Gate(VGroup):
    """Two posts and a barrier between them, with a gap as wide as the gate is open."""

    def __init__(self, *, x: float, y: float, width: float):
        self.x, self.wide, self.opening = x, width, 0.0
        halves = (Rectangle(width=1, height=0.16, stroke_width=0, fill_color=THEME.muted, fill_opacity=1) for _ in range(2))
        posts = (Rectangle(width=0.1, height=0.4, stroke_width=0, fill_color=THEME.ink, fill_opacity=1) for _ in range(2))
        super().__init__(*halves, *posts)
        self.move_to([x, y, 0])
        for post, side in zip(self[2:], (-1, 1), strict=True):
            post.set_x(x + side * width / 2)
        self._draw(0.0)

    def show(self, opening: float) -> Change:
        """Open or close to this share."""
        old, self.opening = self.opening, opening
        return Change(self, lambda alpha: self._draw(old + alpha * (opening - old)), run_time=1.2)

    def _draw(self, opening: float) -> None:
        part = max(1e-3, self.wide * (1 - opening) / 2)
        for half, side in zip(self[:2], (-1, 1), strict=True):
            half.stretch_to_fit_width(part).set_x(self.x + side * (self.wide - part) / 2)


class GatedMLA(StageScene):
    """Every note keeps a card of its own and is recalled exactly; a gate lets out only what was asked."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        if story.learned or story.gate_held != "learned":
            raise ValueError("story: this scene is for a story by hand whose gate is not held")
        notes = [tuple(token.split(": ", 1)) for token in story.tokens[:-1]]
        N, H, numbers = len(story.tokens), len(story.heads), story.latent.shape[1]
        if N > 6 or H > 4:
            raise ValueError(f"story: there is room for 5 notes in 4 rows, got {N - 1} in {H}")
        rows = [head.removesuffix(" head") for head in story.heads]
        row = next((r for r in rows[::-1] if r != story.slot and r == "room"), next((r for r in rows if r != story.slot), story.slot))

        def again(slot: str, gate: str = "learned") -> MLAStory:
            return mla_story(notes=notes, slot=slot, gate=gate)

        self.next_section("question")
        self.ask("Notes come in, one of them corrects another.", "How is the right one found again?")

        self.next_section("cards")
        pitch = (2 * SAFE[0] - QUESTION) / (N - 1)
        middles = [*(-SAFE[0] + (i + 0.5) * pitch for i in range(N - 1)), SAFE[0] - QUESTION / 2]
        widths = [*[pitch - 0.12] * (N - 1), QUESTION]
        ink = float(np.abs(story.latent).max())
        labels = [*notes, ("question", "")]
        cards = [self.card(*labels[i], story.latent[i], ink, middles[i], widths[i]) for i in range(N)]
        grown = Texts([(-SAFE[0], CARDS - CARD - 0.32)])
        colors = legend(((ROLES["erase"], "negative"), (ROLES["memory"], "positive")), x=SAFE[0] - 4.2, y=CARDS - CARD - 0.32)
        source = self.cite("Computed by a GatedMLA layer with hand-chosen weights. K3 report, Eq. 7")
        self.add(grown)
        self.play(FadeIn(source, colors), self.say("Every note leaves a card of its own. No later note can change it."))
        for i, (name, word) in enumerate(notes):
            self.play(
                self.read(f"{name}: {word}", dict.fromkeys(name.split(), "key") | dict.fromkeys(word.split(), "value")),
                FadeIn(cards[i]), grown.show([f"{(i + 1) * numbers} numbers kept"]),
            )  # fmt: skip
            self.wait(0.3)
        big = story.forms
        self.play(self.say(f"In {big.model} a card is {format_count(big.numbers('absorbed'))} numbers; keys and values of {big.heads} "
                           f"heads would be {format_count(big.numbers('kept'))}."))  # fmt: skip
        self.wait(2.4)

        self.next_section("heads")
        spots = [-SAFE[0] + (h + 0.5) * 2 * SAFE[0] / H for h in range(H)]
        heads = VGroup(*(self.head(name, x) for name, x in zip(story.heads, spots, strict=True)))
        edges = Edges([(x, HEADS + 0.28) for x in spots for _ in range(N)], [(x, CARDS - CARD) for _ in spots for x in middles],
                      color=ROLES["query"], thickest=0.12)  # fmt: skip
        question = "The meeting is now on ___" if story.slot == "day" else f"The {story.slot} is now ___"
        self.play(
            self.read(question, {"meeting": "query", story.slot: "query"}), FadeIn(cards[-1]), grown.show([""]), swap(colors, VGroup()),
            self.say(f"A question comes. Each of the {H} heads looks its row up in all cards."),
        )  # fmt: skip
        weights = story.attention[:, -1]
        self.add(edges)
        self.play(FadeIn(heads), edges.show(np.where(weights >= READS, weights, 0).ravel()), run_time=1.4)
        token, share = story.reads(rows.index(story.slot))
        later = ": of two notes it prefers the later" if sum(name == story.slot for name, _ in notes) == 2 else ""
        self.play(self.say(f"The {story.slot} head reads “{token}” {format_probability(share)}{later}."))
        self.wait(2.4)

        self.next_section("gate")
        wide = 2 * SAFE[0] / H - 0.5
        gates = [Gate(x=x, y=BARRIER, width=wide) for x in spots]
        opened = Texts([(x - wide / 2, BARRIER - 0.45) for x in spots])
        out = Texts([(-SAFE[0], OUT)], size=BODY)
        self.add(opened, out)
        self.play(FadeIn(*gates), self.say("Behind every head stands a gate, computed from the same token."))
        self.play(self.open(gates, opened, story), self.said(out, story),
                  self.say(f"It opens for the {story.slot} and stays shut for the rest."))  # fmt: skip
        self.wait(2.2)
        if row != story.slot:
            other = again(row)
            self.play(
                self.read(f"The {row} is ___", {row: "query"}),
                self.open(gates, opened, other), self.said(out, other), self.say("Another question: the same cards, another gate."),
            )  # fmt: skip
            self.wait(2)
        held = again(row, "open")
        self.play(self.open(gates, opened, held), self.said(out, held), self.say("Held open by force, it lets everything out at once."))
        self.wait(1.8)

        self.next_section("answer")
        word, strength = story.answers[-1][0]
        self.play(
            self.read(question, {"meeting": "query", story.slot: "query"}),
            self.open(gates, opened, story), self.said(out, story),
            self.say(f"Every note can be recalled, {word} with {format_number(strength)} of its strength, because every note keeps a card: "
                     "this memory grows.", bold=True),
        )  # fmt: skip
        self.wait(4.5)

    def card(self, name: str, word: str, latent: np.ndarray, ink: float, x: float, width: float) -> Group:
        """A note's card: its row, its word, its latent numbers."""
        frame = RoundedRectangle(corner_radius=0.1, width=width, height=CARD, stroke_color=THEME.line, stroke_width=2)
        strip = Grid(latent[None], limit=ink, left=x - width / 2 + 0.15, top=CARDS - CARD + 0.15 + STRIP, width=width - 0.3, height=STRIP)
        labels = VGroup(Label(name, size=SMALL), Label(word, size=SMALL, bold=True)) if word else VGroup(Label(name, size=SMALL))
        for label, y in zip(labels, (CARDS - 0.32, CARDS - 0.8), strict=False):
            if label.width > width - 0.1:
                raise ValueError(f"notes: {label.text!r} is too long for the drawn card")
            label.at(x - width / 2 + min(0.15, (width - label.width) / 2), y)
        return Group(frame.set_fill(THEME.empty, 1).move_to([x, CARDS - CARD / 2, 0]), labels, strip)

    def head(self, name: str, x: float) -> VGroup:
        label = Label(name, size=SMALL)
        box = RoundedRectangle(corner_radius=0.1, width=label.width + 0.4, height=0.56, stroke_color=THEME.line, stroke_width=2)
        return VGroup(box.set_fill(THEME.empty, 1).move_to([x, HEADS, 0]), label.at(x - label.width / 2, HEADS))

    def open(self, gates: list[Gate], opened: Texts, story: MLAStory) -> Change:
        """All gates go to what the layer lets through of each head, with the shares as texts."""
        shares = story.gate[-1].mean(-1)
        moves = [gate.show(float(share)) for gate, share in zip(gates, shares, strict=True)]
        update, done = opened.go([f"{format_probability(share)} passes" for share in shares])

        def both(alpha: float) -> None:
            update(alpha)
            for move in moves:
                move.update(alpha)

        return Change(VGroup(opened, *gates), both, done, run_time=1.2)

    def said(self, out: Texts, story: MLAStory) -> Change:
        words = " + ".join(f"{word} {format_number(x)}" for word, x in story.answers[-1])
        return out.show([f"Out: {words}" if words else "Nothing comes out"])
