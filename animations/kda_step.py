"""The one-word scene: a key and a value edit the state, a query reads the edited state, and a state of the same size goes on.

    manim -ql animations/kda_step.py KDAStep

K3_FACTS and K3_UPDATE change the notes and the correction, as in ``whiteboard.py``. In Python: a subclass with
``story = whiteboard_story(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Arrow, FadeIn, FadeOut, VGroup

from animations.grids import Grid
from animations.stage import SAFE, SMALL, THEME, Formula, Label, StageScene, legend, swap
from animations.whiteboard import story_from_environment
from k3viz.theme import ROLES, format_number
from k3viz.whiteboard.story import PHASES, position

TOP, SIZE = 2.25, 2.8  # upper edge and size of both states
BEFORE, STEPS, AFTER = -SAFE[0], -3.5, 0.5  # left edges: the state before, the equations, the state after
SLOTS = (-0.7, -1.1)  # upper edges of the two value vectors under the state after
THICK = 0.28
LINES = (  # name, role, equation; the four things that one word does
    ("fade", "decay", "S' =", 'op("Diag")(alpha_t) S_(t-1)'),
    ("correct", "erase", "e_t =", "v_t - S'^top k_t"),
    ("write", "write", "S_t =", "S' + beta_t k_t e_t^top"),
    ("read", "query", "o_t =", "S_t^top q_t"),
)


class KDAStep(StageScene):
    """One word passes: its key and value correct the state, its query reads the result, a state of the same size goes on."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        *facts, update = story.writes
        row, before = update.row, position(len(facts) - 1, "write")
        faded, _, written = (position(len(facts), phase) for phase in PHASES)
        states = {name: story.frame(at).state for name, at in (("before", before), ("faded", faded), ("written", written))}
        key, value = story.keys[story.rows.index(row)], story.values[story.words.index(update.word)]
        if not story.says(row) or story.says(row)[0][0] != update.word:
            raise ValueError(f"story: beta = {story.beta:g} is too small, the row does not say {update.word!r} in the end")
        held, out = story.answer(row, faded), story.answer(row, written)
        error = value - held
        ink = max(abs(s).max() for s in states.values())
        loudest = max(abs(x).max() for x in (value, held, error, out))
        alpha, beta = format_number(story.alpha), format_number(story.beta)
        size = "{} × {} numbers".format(*states["before"].shape)

        def state(name: str, left: float) -> Grid:
            return Grid(states[name], limit=ink, left=left, top=TOP, width=SIZE, height=SIZE)

        def upright(vector: np.ndarray) -> Grid:
            return Grid(vector[:, None], limit=abs(key).max(), left=AFTER - THICK - 0.15, top=TOP, width=THICK, height=SIZE)

        def flat(vector: np.ndarray, slot: int) -> Grid:
            return Grid(vector[None], limit=loudest, left=AFTER, top=SLOTS[slot], width=SIZE, height=THICK)

        def under(words: str) -> Label:
            label = Label(words, size=SMALL)
            return label.at(AFTER - 0.12 - label.width, SLOTS[0] - THICK / 2)

        def beside(words: str, slot: int) -> Label:
            return Label(words, size=SMALL).at(AFTER + SIZE + 0.2, SLOTS[slot] - THICK / 2)

        def reading(title: str, vector: np.ndarray) -> VGroup:
            said = [(title, False), *((f"{word} {format_number(x)}", True) for word, x in story.words_in(vector))]
            return VGroup(
                *(Label(words, size=SMALL, bold=bold).at(AFTER + SIZE + 0.2, TOP - 0.2 - 0.5 * i) for i, (words, bold) in enumerate(said))
            )

        self.next_section("question")
        self.ask(update.text, "What does one word do to the memory?")

        self.next_section("before")
        start = state("before", BEFORE)
        titles = VGroup(Label(f"Before: {size}", size=SMALL).at(BEFORE, TOP + 0.27))
        colors = legend(((ROLES["erase"], "negative"), (ROLES["memory"], "positive")), x=BEFORE, y=SLOTS[0] - THICK / 2)
        source = self.cite("Computed with hand-chosen k, q, v, α, β. Equation: K3 report, Eq. 1")
        self.play(
            FadeIn(start, titles, colors, source),
            self.read(update.text, dict.fromkeys(row.split(), "key") | {update.word: "value"}),
            self.say("The words before left a state. What this word does to it takes four lines."),
        )
        lines = {name: Formula(((None, left), (name, right)), {name: role}, {}, x=STEPS, y=TOP - 0.35 - 0.7 * i)
                 for i, (name, role, left, right) in enumerate(LINES)}  # fmt: skip
        self.play(FadeIn(*lines.values()))
        self.wait(1.5)

        self.next_section("fade")
        now = state("before", AFTER)
        title = VGroup(Label("This word", size=SMALL).at(AFTER, TOP + 0.27))
        self.play(lines["fade"].light("fade"), self.say(f"Fade: every channel keeps α = {alpha} of what it held."), FadeIn(now, title))
        self.play(now.show(states["faded"]))
        self.wait(0.6)

        self.next_section("correct")
        strip, upper, says = upright(key), flat(value, 0), VGroup()
        names = VGroup(under("key k"), VGroup(beside("value v", 0)), VGroup())
        self.add(says)
        self.play(
            lines["fade"].light(), self.say(f"The word brings a key, “{row}”, and a value, “{update.word}”."), FadeIn(strip, upper, names)
        )
        self.wait(1.2)
        lower = flat(held, 1)
        self.play(
            lines["correct"].light("correct"), self.say("The key asks the state what stands there now."),
            FadeIn(lower), swap(names[2], VGroup(beside("held", 1))), swap(says, reading("held:", held)),
        )  # fmt: skip
        self.wait(1.4)
        self.play(
            self.say("What the value says beyond that is the correction, e."), upper.show(error),
            swap(names[1], VGroup(beside("e = v − held", 0))), swap(says, reading("correction:", error)),
        )  # fmt: skip
        self.wait(1.6)

        self.next_section("write")
        self.play(lines["correct"].light(), lines["write"].light("write"), FadeOut(lower), swap(names[2], VGroup()),
                  self.say(f"Key times correction is added to the state, with strength β = {beta}."))  # fmt: skip
        self.play(now.show(states["written"]))
        self.wait(1.2)

        self.next_section("read")
        query = upright(key)
        title_k = names[0]
        self.play(FadeOut(strip, title_k, upper), swap(names[1], VGroup()), lines["write"].light(), swap(says, VGroup()))
        names.remove(title_k)
        output = flat(out, 0)
        name = under("query q")
        self.play(
            lines["read"].light("read"), self.say(f"Then a query reads the new state. Here it asks for “{row}”."), FadeIn(query, name)
        )
        self.wait(0.5)
        self.play(FadeIn(output), swap(names[0], VGroup(beside("output o", 0))), swap(says, reading("output:", out)))
        self.wait(2)

        self.next_section("answer")
        self.play(FadeOut(query, name, output, names, *lines.values()), swap(says, VGroup()), swap(title, VGroup()), swap(colors, VGroup()))
        middle = TOP - SIZE / 2
        arrows = VGroup(
            Arrow([BEFORE + SIZE, middle, 0], [AFTER, middle, 0], color=THEME.ink, buff=0.3, stroke_width=4),
            Label("this word", size=SMALL).at(-2.3, middle + 0.35),
            Arrow([AFTER + SIZE, middle, 0], [SAFE[0], middle, 0], color=THEME.ink, buff=0.3, stroke_width=4),
            Label("the next word", size=SMALL).at(AFTER + SIZE + 0.45, middle + 0.35),
        )
        reads = VGroup()
        for left, frame in ((BEFORE, before), (AFTER, written)):
            word, strength = story.says(row, frame)[0]
            reads.add(Label(f"{row}: {word} {format_number(strength)}", size=SMALL, bold=True).at(left, SLOTS[0] - THICK / 2))
        self.play(
            FadeIn(arrows, reads), swap(title, VGroup(Label(f"After: {size}", size=SMALL).at(AFTER, TOP + 0.27))),
            self.say(
                f"The word corrected the state in place: {row} now says {update.word}. The next word finds a state of the same size.",
                bold=True,
            ),
        )  # fmt: skip
        self.wait(4.5)
