"""The toolbox on the meeting notes: four ways to keep less, each a small trained model that really reads them.

    manim -ql animations/toolbox.py Toolbox          # the four side by side
    manim -ql animations/toolbox.py ShareGQA         # or ShrinkMLA, ForgetSlidingWindow, ReplaceLinear

A teacher's own notes, through the environment (words of the meeting vocabulary; the scenes and their numbers follow):

    K3_FACTS="client: Globex; day: Monday; room: 2A; attendees: ten" K3_UPDATE="Friday" manim -ql animations/toolbox.py ShareGQA

K3_FACTS: any of the four, separated by semicolons. K3_UPDATE is the correction, "row: word", or a word alone, which then goes to the
row of the last note, or to the day where K3_FACTS is not set. In Python: a subclass with ``story = toolbox_story(...)``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # manim runs this file by its path, the packages lie one up

import numpy as np
import torch
from manim import FadeIn, FadeOut, Rectangle, VGroup

from animations.board import HeatMap
from animations.meters import AnswerBoard, HeadRows, Meter, TokenBars, pair_of_meters
from animations.notes import Blank, NoteCard, NoteStrip, Reach, ToldNotes, joined, out_of_reach, says, slid_out, toolbox_slots
from animations.stage import SAFE, SMALL, Label, StageScene, paragraph, swap
from k3viz.theme import MIXER_COLORS, format_bytes, format_count, format_probability
from k3viz.toolbox.story import IDEAS, LABELS, MOST_CHAT
from minimodel import cache_bytes, facts
from minimodel.accounting import row_numbers
from minimodel.toolbox import LENGTH


class ReplaceLinear(ToldNotes, StageScene):
    """Replace: a state of fixed size is edited in place, so Thursday takes Tuesday's row and the memory never grows."""

    technique = "kda"

    def construct(self) -> None:
        story = self.told()
        *notes, update = story.notes
        old, new = (story.again(read=end).of("kda").answer[0][0] for end in (notes[-1][1], update[1]))
        rows = toolbox_slots()

        def answers(read: int) -> dict[str, tuple[str, str]]:
            asked = {slot: story.again(slot=slot, read=read).of("kda") for slot in rows}
            return {slot: (k.answer[0][0], format_probability(k.answer[0][1])) for slot, k in asked.items() if not k.guess}

        def states(read: int) -> np.ndarray:
            layers, heads, K, V = (x := story.again(read=read).states).shape
            return x.transpose(0, 2, 1, 3).reshape(layers * K, heads * V)  # a row of squares a layer, one square a head

        def show(read: int, run_time: float) -> None:
            kept = story.again(read=read)
            changes = (m.show(kept.of(t).bytes) for t, m in meters.items())
            self.play(board.show(answers(read)), state.show(states(read)), *changes, run_time=run_time)

        self.next_section("question")
        self.ask(joined(story.tokens[slice(*update)]), f"Where does {story.tokens[story.fact]} go, if the memory may not grow?")

        self.next_section("notes")
        strip = NoteStrip(story)
        board = AnswerBoard(rows, left=-SAFE[0], right=3.5, top=1.55, bottom=-0.9)
        state = HeatMap(states(0), limit=float(np.quantile(np.abs(states(update[1])), 0.97)), left=SAFE[0] - 2.45, top=1.55, size=2.45)
        says_now, whole = Label("If asked now, it says", size=SMALL), Label("Its whole state", size=SMALL)
        titles = VGroup(says_now.at(-SAFE[0], 1.83), whole.at(SAFE[0] - 2.6, 1.83))
        meters = pair_of_meters({"kda": "state (KDA)", "mha": "notebook (MHA)"}, story.of("mha").bytes, y=-1.25, start=-3.6)
        layers, heads, K, V = story.states.shape
        start = self.say(f"No notebook: one state, {layers} layers × {heads} heads × {K} × {V} numbers, and every token edits it.")
        self.play(FadeIn(board, state, titles, *meters.values(), self.source(story)), start)
        self.wait(1.5)
        for note, (_, end) in zip(strip.notes, notes, strict=False):
            self.play(FadeIn(note), run_time=0.6)
            show(end, 1.4)
            self.wait(0.4)

        self.next_section("update")
        place = board.outline(story.slot)
        self.play(FadeIn(strip.notes[-1], place), self.say(f"The update edits the same numbers. The row {story.slot} said {old}."))
        self.wait(1.5)
        show(update[1], 2)
        self.wait(1.2)

        self.next_section("answer")
        self.play(FadeIn(strip.question), self.say(f"Asked, it says {says(story, 'kda')}. The sentences themselves are not kept."))
        self.play(strip.fill(story.of("kda").answer[0][0]))
        self.wait(2)
        far = story.config("kda").max_position_embeddings
        size = format_bytes(cache_bytes(story.config("kda"), far, dtype=torch.float32).total)
        now = f"{format_bytes(story.of('kda').bytes)} now, {size} at {format_count(far)} tokens (by the formula)"
        self.play(FadeOut(place), self.say(f"{new} replaced {old}, and the state did not grow: {now}.", bold=True))
        self.wait(4.5)


class ForgetSlidingWindow(ToldNotes, StageScene):
    """Forget: the tray is full, so the oldest note slides out; one layer loses it at once, a stack of layers a little later."""

    technique = "sliding_window"

    def construct(self) -> None:
        story = self.told()
        window, reach = story.window, story.layers * (story.window - 1)
        held = [len(story.again(read=end).tray()) for _, end in story.notes]
        if not min(held):
            raise ValueError(f"window: {window} tokens are too few to hold any note of this scene")
        near = slid_out(story)
        far, control, other = out_of_reach(near)
        lost, word = near.slot, near.tokens[near.fact]

        self.next_section("question")
        self.ask(f"A desk tray with room for {max(held)} notes, and a new one arrives.", "What is lost when the oldest slides out?")

        self.next_section("tray")
        left = SAFE[0] - 2.45 * max(held)
        tray = Rectangle(width=2.45 * max(held), height=1.65, stroke_color=MIXER_COLORS[self.technique], stroke_width=5)
        tray.move_to([(left + SAFE[0]) / 2, 2.3, 0])
        title = Label(f"Window: the newest {window} tokens, in each layer", size=SMALL).at(left, 3.4)
        meters = pair_of_meters({"sliding_window": "window", "mha": "MHA"}, story.of("mha").bytes, y=1.12)
        cards = [NoteCard(joined(story.tokens[a:b])) for a, b in story.notes]
        self.play(FadeIn(tray, title, *meters.values(), self.source(story)), self.say("Each layer keeps only the newest tokens."))
        for j, (_, end) in enumerate(story.notes):
            if j == len(story.notes) - 1:
                self.next_section("update")
                self.play(self.say("The update arrives. To make room, the oldest note slides out."))
            cards[j].move_to([SAFE[0] - 1.22, -0.55, 0])
            self.play(FadeIn(cards[j]), run_time=0.5)
            first = j + 1 - held[j]
            moves = []
            for i, (a, b) in enumerate(story.notes[: j + 1]):
                move = cards[i].animate.move_to([left + 2.45 * (i - first + 0.5) if i >= first else left - 1.75, 2.3, 0])
                moves.append(move if i >= first or a <= near.fact < b else move.set_opacity(0))  # of what is out, the lost fact stays
            kept = story.again(read=end)
            self.play(*moves, *(m.show(kept.of(t).bytes) for t, m in meters.items()), run_time=1.2)
        self.play(FadeIn(Label("out", size=SMALL).at(left - 1.95, 3.4)), run_time=0.4)
        self.wait(0.6)

        self.next_section("answer")
        asked = Label(joined(story.tokens[story.text_tokens :])).at(-SAFE[0], -0.4)
        blank = Blank(asked.get_right()[0] + 0.2, -0.4)
        tray = f"The update is in the tray: asked for the {story.slot}, it says {says(story, self.technique)}."
        self.play(FadeIn(asked, blank), self.say(tray))
        self.play(blank.fill(story.of(self.technique).answer[0][0]))
        self.wait(2)

        self.next_section("reach")
        step = window - 1
        stairs = Reach(story.layers, step, far=far.distance(), top=-0.1, color=MIXER_COLORS[self.technique])
        mark = VGroup(*stairs.mark(word, near.distance()))
        self.play(FadeOut(asked, blank), run_time=0.4)
        back = f"{word} stands {near.distance()} tokens before the blank"
        self.play(FadeIn(stairs[0], mark), self.say(f"Asked for the {lost}: {back}. One layer looks {step} back: it can't read it."))
        self.wait(2.6)
        stack = f"{story.layers} layers reach {story.layers} × {step} = {reach} tokens"
        self.play(FadeIn(stairs[1:]), self.say(f"But layers below had read it: {stack}. It says {says(near, self.technique)}."))
        self.wait(2.8)
        guess = says(far, self.technique)
        same = "the same" if says(control, self.technique) == guess else says(control, self.technique)
        later = f"{far.settings['chat']} sentences of chat later it is out of reach"
        unit = meters["mha"].unit * story.of("mha").bytes / far.of("mha").bytes
        self.play(
            swap(mark, stairs.mark(word, far.distance())), *(m.show(far.of(t).bytes, unit=unit) for t, m in meters.items()),
            self.say(f"{later}. It guesses {guess}; with {other} in the note, {same}."),
        )  # fmt: skip
        self.wait(3.2)

        self.next_section("end")
        size = format_bytes(story.of(self.technique).bytes)
        end = f"The window stops the growth at {size}. What slides out is lost to a layer at once, to the stack after {reach} tokens."
        self.play(self.say(end, bold=True))
        self.wait(4.5)


class ShrinkMLA(ToldNotes, StageScene):
    """Shrink: a token's keys and values become one small latent card, but every new token still adds a card."""

    technique = "mla"

    def construct(self) -> None:
        story = self.told()
        full, card = (row_numbers(story.config(t), t) for t in ("mha", "mla"))
        k = story.of("mla")

        self.next_section("question")
        self.ask(f"A token leaves {full} numbers in each layer.", "How few of them are enough?")

        self.next_section("notes")
        strip = NoteStrip(story)
        bars = TokenBars(strip, base=0.25, unit=1.65 / full, color=MIXER_COLORS["mha"])
        height = VGroup(Label(str(full), size=SMALL).at(-SAFE[0], 1.0))
        meters = pair_of_meters({"mha": "MHA", "mla": "MLA"}, story.of("mha").bytes, y=-0.35)
        source = VGroup(self.source(story))
        every = self.say(f"Keep all: {full} numbers a token, keys and values of every head.")
        self.play(FadeIn(height, bars, *meters.values(), source), every)
        for note, (_, end) in zip(strip.notes, story.notes, strict=True):
            self.play(FadeIn(note), bars.show([full] * end), meters["mha"].show(story.again(read=end).of("mha").bytes), run_time=1)
        self.wait(0.8)

        self.next_section("shrink")
        shrunk = self.say(f"Latent attention keeps a card of {card} numbers instead, and makes keys and values from it when it reads.")
        smaller = swap(height, VGroup(Label(str(card), size=SMALL).at(-SAFE[0], 0.45)))
        self.play(bars.show([card] * story.read, color=MIXER_COLORS["mla"]), smaller, meters["mla"].show(k.bytes), shrunk, run_time=2)
        self.wait(2)
        rebuilt = f"the {full} of the MHA model could be rebuilt with an error of {format_probability(story.rebuilt)}"
        self.play(self.say(f"Little is lost: from {card} numbers a token, {rebuilt}, by the best linear map."))
        self.wait(2.4)

        self.next_section("answer")
        self.play(FadeIn(strip.question), self.say(f"The blank is filled from the cards: {says(story, 'mla')}."))
        self.play(strip.fill(k.answer[0][0]), run_time=0.8)
        self.wait(1)
        grown = (story.read + story.asked) * [card]
        more = k.bytes + story.asked * k.per_token
        adds = f"But every new token, these {story.asked} too, adds a card: {format_bytes(k.per_token)} in all layers."
        self.play(bars.show(grown), meters["mla"].show(more), self.say(adds))
        self.wait(2)

        self.next_section("published")
        big = facts.DeepSeekV2
        before, after = big.numbers_before.value, big.numbers_after.value
        unit = (SAFE[0] - 1.7 + 3.5) / before
        names = (("DeepSeek-V2: all", "mha", -1.35), ("its card", "mla", -1.82))
        pair = VGroup(*(Meter(name, MIXER_COLORS[t], y=y, unit=unit, start=-3.5) for name, t, y in names))
        for meter, amount in zip(pair, (before, after), strict=True):
            meter.show(amount, format_count(amount)).now()
        fewer = f"{format_count(after)} numbers a token and layer instead of {format_count(before)}, {before / after:.0f}× fewer"
        self.play(FadeIn(pair), swap(source, VGroup(self.cite(f"Published: {big.numbers_after.source.split(' (')[0]}"))),
                  self.say(f"Published, for comparison: DeepSeek-V2 keeps {fewer}."))  # fmt: skip
        self.wait(3)
        self.play(FadeOut(pair), swap(source, VGroup(self.source(story))), run_time=0.8)
        end = f"Shrink: {full} numbers become a card of {card}, and the answer is still {k.answer[0][0]}. The row of cards keeps growing."
        self.play(self.say(end, bold=True))
        self.wait(4.5)


class ShareGQA(ToldNotes, StageScene):
    """Share: four heads read one copy of the notes, so a quarter of the bytes is kept and all of the history stays."""

    technique = "gqa"

    def construct(self) -> None:
        story = self.told()
        heads, groups = len(story.heads), story.groups
        k, mha = story.of("gqa"), story.of("mha")
        copies = f"{groups} shared {'copy' if groups == 1 else 'copies'}"

        self.next_section("question")
        self.ask(f"{heads} heads read the same notes.", "Must each keep a copy of its own?")

        self.next_section("notes")
        strip = NoteStrip(story)
        own = [TokenBars(strip, base=1.5 - 0.44 * h, unit=0.34, color=MIXER_COLORS["mha"], name=f"head {h + 1}") for h in range(heads)]
        meters = pair_of_meters({"mha": "MHA", "gqa": "GQA"}, mha.bytes, y=-1.25)
        every = self.say(f"Keep all: each of the {heads} heads keeps its own keys and values of every token.")
        self.play(FadeIn(*own, *meters.values(), self.source(story)), every)
        for note, (_, end) in zip(strip.notes, story.notes, strict=True):
            copied = (bars.show([1] * end) for bars in own)
            self.play(FadeIn(note), *copied, meters["mha"].show(story.again(read=end).of("mha").bytes), run_time=1)
        self.wait(1)

        self.next_section("share")
        shared = []
        for g in range(groups):
            look = {"unit": 0.31 / groups, "color": MIXER_COLORS["gqa"], "name": "" if g else "shared"}
            shared.append(TokenBars(strip, base=1.84 - 0.34 * (g + 1) / groups, **look))
            shared[-1].show([1] * story.read).now()
        merged = [bars.animate.shift([0, 0.44 * h, 0]).set_opacity(0) for h, bars in enumerate(own)]
        self.play(*merged, run_time=1.2)
        self.remove(*own)
        fewer = f"all {heads} heads read {copies}, in {format_bytes(k.bytes)} instead of {format_bytes(mha.bytes)}"
        self.play(FadeIn(*shared), meters["gqa"].show(k.bytes), self.say(f"Grouped queries: {fewer}."))
        self.wait(2)

        self.next_section("heads")
        self.play(FadeIn(strip.question), self.say(f"What each head of layer {story.layer} reads, in what is shared, to fill the blank:"))
        self.play(FadeIn(HeadRows(strip, story.heads, top=1.3)))
        self.wait(2.4)
        most = [(h + 1, row, int(row.argmax())) for h, row in enumerate(story.heads)]
        best = {i: (h, row[i]) for h, row, i in sorted(most, key=lambda head: head[1][head[2]]) if row[i] > 0.5}
        sharp = [f"head {h} reads {story.tokens[i]} ({format_probability(p)})" for i, (h, p) in sorted(best.items(), reverse=True)[:2]]
        if sharp:
            self.play(self.say(f"Different questions to the same copy: {', '.join(sharp)}."))
            self.wait(2.6)

        self.next_section("answer")
        self.play(strip.fill(k.answer[0][0]), self.say(f"Together with the other layers: {says(story, 'gqa')}."))
        self.wait(1.8)
        fewer = f"{heads} heads, {copies}: {format_bytes(k.bytes)} instead of {format_bytes(mha.bytes)}"
        end = f"{fewer}, and the answer is {k.answer[0][0]}. Nothing is forgotten, so it still grows."
        self.play(self.say(end, bold=True))
        self.wait(4.5)


class Toolbox(ToldNotes, StageScene):
    """The toolbox: keep all, share, shrink, forget or replace, side by side on the same notes and a little chat."""

    def construct(self) -> None:
        story = self.told()
        chat = max(n for n in range(MOST_CHAT + 1) if n == 0 or len(story.again(chat=n).tokens) <= LENGTH)
        end = story.again(chat=chat)
        stops = [*(b for _, b in story.notes[-2:]), *(b for _, b in end.notes[len(story.notes) :])]
        most = max(k.bytes for k in end.kept)

        self.next_section("question")
        self.ask("Every note makes the memory larger.", "Which ways are there to keep less?")

        self.next_section("notes")
        start, unit = -2.6, 4.4 / most
        ideas = enumerate((t, f"{IDEAS[t]} ({LABELS[t]})") for t in LABELS)
        rows = {t: Meter(name, MIXER_COLORS[t], y=1.9 - 0.72 * i, unit=unit, start=start) for i, (t, name) in ideas}
        head, line = Label("What the cache holds", size=SMALL).at(start, 2.5), VGroup()
        first = self.say("Five models, alike but for the attention, read the same notes.")
        self.play(FadeIn(*rows.values(), head, self.source(story)), first)
        said = 0
        for i, stop in enumerate(stops):
            if i == 2:
                self.next_section("chat")
                self.play(self.say("Then comes chat that changes nothing. Who pays for it?"))
                self.wait(0.8)
            words, said = joined(end.tokens[said:stop]), stop
            kept = end.again(read=stop)
            self.play(swap(line, self.line(words)), *(row.show(kept.of(t).bytes) for t, row in rows.items()), run_time=1.2)
            self.wait(1.6 if i < 2 else 0.2)

        self.next_section("answers")
        titles = VGroup(Label("If asked now", size=SMALL).at(3.55, 2.5))
        answers = VGroup(*(Label(says(end, t), size=SMALL).at(3.55, row.y) for t, row in rows.items()))
        question = joined(end.tokens[end.text_tokens :])
        asked = self.say("At the end of the chat all are asked the same.")
        self.play(swap(line, self.line(f"{question} ___")), FadeIn(titles, answers), asked)
        self.wait(3)

        self.next_section("what is left")
        oldest = min((end.again(slot=slot) for slot in toolbox_slots()), key=lambda s: s.read if s.fact is None else s.fact)
        word = end.tokens[oldest.fact]
        left = {t: "in the state" if t == "kda" else f"{n} numbers" if (n := end.of(t).numbers[oldest.fact]) else "slid out" for t in rows}
        entries = VGroup(*(Label(left[t], size=SMALL).at(3.55, row.y) for t, row in rows.items()))
        self.play(swap(titles, VGroup(Label(f"of {word}", size=SMALL).at(3.55, 2.5))), swap(answers, entries),
                  self.say(f"What differs is what a layer still holds of the oldest note, {word}."))  # fmt: skip
        self.wait(3)
        adds = {t: format_bytes(end.of(t).per_token) for t in rows}
        still = " and ".join(IDEAS[t] for t in ("sliding_window", "kda") if not end.of(t).per_token)
        more = f"A new token adds {adds['mha']} if all is kept, {adds['gqa']} if shared, {adds['mla']} if shrunk"
        self.play(self.say(f"{more}; {still} add nothing.", bold=True))
        self.wait(4.5)

    def line(self, words: str) -> VGroup:
        """What is read now, at the head of the frame."""
        return paragraph(words, x=-SAFE[0], y=SAFE[1] - 0.25, width=2 * SAFE[0], size=SMALL)
