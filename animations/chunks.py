"""The chunk scene: matrix products inside a chunk, a recurrence across chunks, and the outputs of the token loop.

    manim -ql animations/chunks.py ChunkwiseKDA

K3_TEXT is the note that is read, 2 to 96 words of the course's meeting vocabulary. In Python: a subclass with
``story = chunks_story(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
from manim import Arrow, FadeIn, FadeOut, VGroup

from animations.decay import tile_from_environment
from animations.grids import Grid
from animations.stage import SAFE, SMALL, Formula, Label, StageScene, legend
from k3viz.theme import ROLES, format_digits, plural

LOOP, CHUNKS, TALL = 3.08, 1.5, 0.95  # upper edges of the two rows of outputs, their height
TABLES, SIZE = -0.1, 1.55  # upper edge and size of the tables
STATE = "(Gamma dot.o Q) S"
INSIDE = "P X"


class ChunkwiseKDA(StageScene):
    """Inside a chunk matrix products, across chunks a recurrence: a few steps give the outputs of the token loop."""

    story = None

    def construct(self) -> None:
        story = self.story or tile_from_environment()
        T, n = len(story.tokens), len(story.bounds)
        if np.isnan(story.errors).any():
            raise ValueError(f"story: {np.isnan(story.errors).sum()} of {T} outputs are not numbers, there is nothing to compare")
        if n > 6:
            raise ValueError(f"story: the drawn note has room for 6 chunks, got {n}")
        loop, chunked = story.reference.T, story.outputs.T
        ink = float(np.quantile(np.abs(loop), 0.97))  # a few large outputs would leave the rest pale

        def filled(outputs: np.ndarray, words: int) -> np.ndarray:
            return outputs * (np.arange(T) < words)

        def row(top: float) -> Grid:
            return Grid(0 * loop, limit=ink, left=-SAFE[0], top=top, width=2 * SAFE[0], height=TALL)

        self.next_section("question")
        self.ask("A recurrence takes one step a word.", f"Must {T} words take {T} steps?")

        self.next_section("token loop")
        first = row(LOOP)
        channels = f"{loop.shape[0]} output channels (down) of {T} words (across)"
        titles = VGroup(Label(f"Token by token: {channels}", size=SMALL).at(-SAFE[0], LOOP + 0.28))
        place = f"layer {story.place[0] + 1}, head {story.place[1] + 1}"
        source = self.cite(f"Trained meeting model, {place}; Γ in {story.numbers}. K3 report, Eq. 3-4")
        self.play(FadeIn(first, titles, source), self.say("The token loop: every word waits for the one before it."))
        self.play(first.run(np.stack([filled(loop, t + 1) for t in range(T)]), run_time=5))
        count = Label(f"{T} steps", size=SMALL, bold=True)
        self.play(FadeIn(count.at(SAFE[0] - count.width, LOOP + 0.28)))
        self.wait(0.8)

        self.next_section("a chunk")
        second = row(CHUNKS)
        frames = [second.spot(slice(None), slice(*bound), ROLES["memory"]) for bound in story.bounds]
        edges = [second.image.get_left()[0] + second.image.width * stop / T for _, stop in story.bounds]
        names = VGroup(*(Label(f"{a + 1} to {b}", size=SMALL).at(frame.get_left()[0] + 0.55, CHUNKS - TALL - 0.3)
                         for (a, b), frame in zip(story.bounds, frames, strict=True)))  # fmt: skip
        title = Label(f"Chunk by chunk: {story.chunk} words at once", size=SMALL).at(-SAFE[0], CHUNKS + 0.28)
        self.play(FadeIn(second, *frames, names, title), self.say(f"Cut the note into {n} {plural('chunk', n)}. What happens inside one?"))
        self.wait(1)
        tables = [
            Grid(part[0], limit=1, left=-SAFE[0] + 2.0 * i, top=TABLES, width=SIZE, height=SIZE)
            for i, part in enumerate((story.L, story.inverse, [a / self.most(story.P) for a in story.P]))
        ]
        labels = [Label(words, size=SMALL) for words in ("L", "(I + L)⁻¹", "P")]
        for label, table in zip(labels, tables, strict=True):
            label.at(table.get_x() - label.width / 2, TABLES - SIZE - 0.27)
        written = Formula(((None, "X ="), ("solve", "(I + L)^(-1) op(\"diag\")(beta)"), (None, "(V - (Gamma dot.o K) S)")),
                          {"solve": "erase"}, {}, x=-0.35, y=TABLES - 0.3)  # fmt: skip
        out = Formula(((None, "O ="), ("state", STATE), (None, "+"), ("inside", INSIDE)), {"state": "memory", "inside": "write"},
                      {"state": "before", "inside": "inside"}, x=-0.35, y=TABLES - 1.0)  # fmt: skip
        self.play(FadeIn(tables[0], labels[0], written), self.say("L: how much each word's key overlaps with the keys of earlier words."))
        self.wait(1.4)
        self.play(
            FadeIn(tables[1], labels[1]), written.light("solve"),
            self.say("One triangular system gives all the corrections that the loop makes one by one."),
        )  # fmt: skip
        self.wait(1.6)
        self.play(
            FadeIn(tables[2], labels[2], out), written.light(), self.say("P: how much each word's query reads of the words up to it.")
        )
        self.play(out.light("inside"))
        self.wait(1)

        self.next_section("across chunks")
        key = legend(((ROLES["memory"], "state S goes on"),), x=SAFE[0] - 3.1, y=CHUNKS + 0.28)
        self.play(
            out.light("state", "inside"), FadeIn(key), self.say("All outputs of the chunk at once. Then the state goes on to the next.")
        )
        for i, (_, stop) in enumerate(story.bounds):
            if i:
                height = CHUNKS - TALL - 0.3
                arrow = Arrow([edges[i - 1] - 0.6, height, 0], [edges[i - 1] + 0.45, height, 0], color=ROLES["memory"], buff=0)
                scaled = [story.L[i], story.inverse[i], story.P[i] / self.most(story.P)]
                same = scaled[0].shape == tables[0].matrix.shape  # the last chunk may be shorter
                moves = [table.show(x, run_time=0.8) for table, x in zip(tables, scaled, strict=True)] if same else []
                self.play(FadeIn(arrow), *moves, run_time=0.8)
            self.play(second.show(filled(chunked, stop), run_time=0.8))
            self.wait(0.3)
        few = Label(f"{n} {plural('step', n)}", size=SMALL, bold=True)
        self.play(FadeOut(key), FadeIn(few.at(SAFE[0] - few.width, CHUNKS + 0.28)), out.light())
        self.wait(0.8)

        self.next_section("answer")
        off = format_digits(story.errors.max())
        work = format_digits(story.work / story.loop_work, digits=3)
        self.play(self.say(f"The same outputs in {n} {plural('step', n)} instead of {T}, to within {off} "
                           f"of the largest, for {work} times the arithmetic.", bold=True))  # fmt: skip
        self.wait(4.5)

    @staticmethod
    def most(tables: tuple[np.ndarray, ...]) -> float:
        return max(float(np.abs(table).max()) for table in tables)
