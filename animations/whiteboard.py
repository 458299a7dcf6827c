"""The whiteboard scene: one token edits the memory in place, fade by erase by write.

    manim -ql animations/whiteboard.py KDAWhiteboard

A teacher's own words, through the environment (the scene, its words and its numbers follow):

    K3_FACTS="client: Globex; budget: $90k; meeting day: Monday" K3_UPDATE="Friday" manim -ql animations/whiteboard.py KDAWhiteboard

K3_FACTS holds up to four notes, "row: word", separated by semicolons. K3_UPDATE is the correction, "row: word", or a word alone,
which then goes to the row of the last note. In Python: a subclass with ``story = whiteboard_story(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

from manim import FadeIn, FadeOut, VGroup

from animations.board import Board, HeatMap
from animations.notes import notes_from_environment
from animations.stage import SAFE, SMALL, Formula, Label, StageScene, legend, swap
from k3viz import whiteboard_story
from k3viz.theme import ROLES, format_number, plural
from k3viz.whiteboard.story import FACTS, PHASES, UPDATE, position

OLD, FADE, ERASE, WRITE = "S_(t-1)", 'op("Diag")(alpha_t)', "(I - beta_t k_t k_t^top)", "beta_t k_t v_t^top"
KDA = ((None, "S_t ="), ("erase", ERASE), ("fade", FADE), (None, OLD), (None, "+"), ("write", WRITE))
ADDITIVE = ((None, "S_t ="), ("fade", FADE), (None, OLD), (None, "+"), ("write", WRITE))
ROLE = {"fade": "decay", "erase": "erase", "write": "write"}
WORDS = {"fade": "1 fade", "erase": "2 erase", "write": "3 write"}
TOP, BOTTOM, FORMULA = 2.5, -0.8, -1.3  # heights: the boards' edges, the equations
SPLIT, RIGHT = 1.3, 1.7  # right edge of the left board, left edge of what stands beside it
COUNT = ("no", "one", "two", "three", "four")


def story_from_environment():
    """The by-hand whiteboard story with the notes in K3_FACTS and the correction in K3_UPDATE, where they are set."""
    facts, update = notes_from_environment(UPDATE[0])
    return whiteboard_story(facts=facts or FACTS, update=update or UPDATE)


class KDAWhiteboard(StageScene):
    """The meeting moves: Kimi Delta Attention fades the board, erases the old day and writes the new one in the same row."""

    story = None

    def construct(self) -> None:
        story = self.story or story_from_environment()
        *facts, update = story.writes
        before = position(len(facts) - 1, "write")
        faded, erased, written = (position(len(facts), phase) for phase in PHASES)
        if not story.says(update.row):
            raise ValueError(f"story: beta = {story.beta:g} is too small, the last write leaves nothing on the board that can be seen")
        alpha, beta = format_number(story.alpha), format_number(story.beta)
        strongest = max(1.0, *(abs(frame.additive_board).max() for frame in story.frames))
        board = Board(story.rows, story.words, left=-SAFE[0], right=SPLIT, top=TOP, bottom=BOTTOM, limit=strongest)
        rows = f"{COUNT[len(story.rows)]} {plural('row', len(story.rows))}"  # the board has no room for more

        def says(frame: int, additive: bool = False) -> dict[str, list[tuple[str, float]]]:
            return {row: story.says(row, frame, additive) for row in story.rows}

        def read(note):
            return self.read(note.text, dict.fromkeys(note.row.split(), "key") | dict.fromkeys(note.word.split(), "value"))

        self.next_section("question")
        self.ask(update.text, f"A board with {rows}: must it grow?")

        self.next_section("notes")
        ink = max(abs(frame.state).max() for frame in story.frames)
        state = HeatMap(story.frame(0).state, limit=ink, left=RIGHT, top=TOP, size=TOP - BOTTOM)
        title = VGroup(self.title("What each row says, and how strongly", -SAFE[0]))
        state_title = self.title("State: {} × {} numbers".format(*state.matrix.shape), RIGHT)
        roles, ends = legend(((ROLES["key"], "key"), (ROLES["value"], "value")), x=3.65, y=SAFE[1] - 0.28), state.legend()
        source = self.cite("Computed with hand-chosen keys, values, α, β. Equation: K3 report, Eq. 1")
        opening = self.say("Each note fills one row of the board: a band of the state.")
        self.play(FadeIn(board, state, roles, ends, title, state_title, source), opening)
        for step, note in enumerate(facts):
            self.play(read(note))
            after = position(step, "write")
            self.play(board.show(says(after)), state.show(story.frame(after).state), run_time=1.2)
            self.wait(0.4)

        self.next_section("update")
        formula = Formula(KDA, ROLE, WORDS, x=-SAFE[0], y=FORMULA)
        self.play(read(update), self.say("The new sentence is one more step of the same operator."))
        self.play(FadeIn(formula), run_time=0.8)
        self.wait(1.2)
        place = board.outline(update.row, state.get_right()[0])
        for name, frame, words in (
            ("fade", faded, f"Fade: every channel keeps α = {alpha} of what it held."),
            ("erase", erased, f"Erase: β = {beta} of what this key held is taken away."),
            ("write", written, f"Write: {update.word} goes into the same row, with strength β = {beta}."),
        ):
            self.next_section(name)
            self.play(formula.light(name), self.say(words), *([FadeIn(place)] if name == "erase" else []))
            self.wait(0.6)
            self.play(board.show(says(frame), color=ROLES[ROLE[name]]), state.show(story.frame(frame).state))
            self.wait(1.2)

        self.next_section("only adding")
        adding = Board(story.rows, story.words, left=RIGHT, right=SAFE[0], top=TOP, bottom=BOTTOM, limit=strongest, labels=False)
        adding.show(says(before, additive=True)).now()
        only = Formula(ADDITIVE, {name: ROLE[name] for name in ("fade", "write")}, {}, x=RIGHT, y=FORMULA)
        self.play(FadeOut(state, state_title, ends, place), formula.light(), self.say("Beside it, the same update without the erase."))
        self.play(FadeIn(adding, only, self.title("Only adding", RIGHT)), swap(title, self.title("Erase, then write", -SAFE[0])))
        self.wait(0.6)
        for name, frame in (("fade", faded), ("write", written)):
            self.play(only.light(name), run_time=0.6)
            self.play(adding.show(says(frame, additive=True), color=ROLES[ROLE[name]]))
        self.wait(0.8)

        self.next_section("answer")
        now = story.says(update.row, written)[0][0]
        left = sorted((word for word, _ in story.says(update.row, written, additive=True)), key=story.words.index)
        answer = f"The board ends with {rows}, as it began: {update.row} says {now}. Adding leaves {' and '.join(left)} in one row."
        stale = [word for word in left if word != update.word]
        self.play(only.light(), self.say(answer, bold=True), adding.tint(update.row, stale, ROLES["erase"]))
        self.wait(4.5)

    def title(self, words: str, x: float) -> Label:
        return Label(words, size=SMALL).at(x, TOP + 0.27)
