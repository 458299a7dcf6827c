"""Parts of the scenes about the meeting notes: what they share, notes over their tokens, note cards, the blank, how far windows reach."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from manim import DashedVMobject, Line, Rectangle, RoundedRectangle, VGroup

from animations.stage import SAFE, SMALL, THEME, Change, Label, coming
from k3viz import toolbox_story
from k3viz.theme import ROLES, format_probability, text_on
from k3viz.toolbox.story import MOST_CHAT, ToolboxStory
from k3viz.whiteboard.story import read_notes
from minimodel.tasks import meeting

NAMES = 1.15  # width of the column left of the tokens, for names of rows
LINE = 0.46  # between lines of text
ALIAS = {"meeting day": "day"}  # the whiteboard's name for a slot
Pair = tuple[str, str]  # (row, word)


# ---- what a teacher can change ----


def notes_from_environment(row: str) -> tuple[tuple[Pair, ...], Pair | None]:
    """The notes in K3_FACTS and the correction in K3_UPDATE; () and None where they are not set.

    A correction that is a word alone goes to the row of the last note, or to ``row`` where there are none. ValueError names the variable.
    """
    facts = read_notes("K3_FACTS", text) if (text := os.environ.get("K3_FACTS")) else ()
    if not (text := os.environ.get("K3_UPDATE")):
        return facts, None
    if ":" not in text:
        text = f"{facts[-1][0] if facts else row}: {text}"
    *others, update = read_notes("K3_UPDATE", text)
    if others:
        raise ValueError(f"K3_UPDATE: write one correction, got {len(others) + 1}")
    return facts, update


def told_from_environment(**settings):
    """The toolbox story with the notes in K3_FACTS and the correction in K3_UPDATE, where they are set; it asks for what was corrected.

    K3_FACTS: "client: Globex; day: Monday; room: 2A; attendees: ten", each one optional. K3_UPDATE: "row: word", or a word alone, which
    then goes to the row of the last note (to the day where K3_FACTS is not set). The words must be in the meeting vocabulary.
    """
    facts, update = notes_from_environment(meeting.ARTICLE_UPDATE[0])
    if facts or update:
        facts = [(ALIAS.get(row, row), word) for row, word in facts]
        row, word = update or (facts[-1][0], meeting.ARTICLE_UPDATE[1])
        row = ALIAS.get(row, row)
        unknown = [slot for slot, _ in (*facts, (row, word)) if slot not in toolbox_slots()]
        if unknown:
            raise ValueError(f"K3_FACTS, K3_UPDATE: these notes have the rows {', '.join(toolbox_slots())}, got {unknown[0]!r}")
        settings |= {"text": notes_text(dict(facts), row, word), "slot": row}
    return toolbox_story(**settings)


def notes_text(facts: dict[str, str], row: str, word: str) -> str:
    """The article's notes with other facts, and the correction of one of them as a sentence."""
    opening = meeting.ARTICLE_FACTS | facts
    moved = min(meeting.TEMPLATES[row][meeting.UPDATE], key=lambda t: "[p]" in t).replace("for [p] ", "")  # rather one without a project
    return f"{meeting.OPENING.format(**opening)} {moved.format(v=word)}"


def toolbox_slots() -> tuple[str, ...]:
    """The slots of the opening sentence, in its order."""
    return tuple(re.findall(r"{(\w+)}", meeting.OPENING))


# ---- what these scenes share ----


class ToldNotes:
    """For a scene about the notes: its story (a class attribute for another one), which technique it looks into, its source."""

    story: ToolboxStory | None = None
    technique = "mha"

    def told(self) -> ToolboxStory:
        story = (self.story or told_from_environment()).again(technique=self.technique)
        if len(story.notes) < 2 or story.fact is None or story.again(read=story.notes[-2][1]).fact is None:
            raise ValueError(f"story: its last note must change the {story.slot}, got {joined(story.tokens[: story.text_tokens])!r}")
        return story

    def source(self, story: ToolboxStory) -> Label:
        heads = story.config("mha").num_attention_heads
        return self.cite(f"Measured: small trained models of this course ({story.layers} layers × {heads} heads, float32)")


def says(story: ToolboxStory, technique: str) -> str:
    """A technique's answer with its probability."""
    word, p = story.of(technique).answer[0]
    return f"{word} {format_probability(p)}"


def slid_out(story: ToolboxStory) -> ToolboxStory:
    """The story asked for the first fact that has left the window. ValueError where none has."""
    asked = (story.again(slot=slot) for slot in toolbox_slots())
    gone = [s for s in asked if s.fact is not None and not s.of("sliding_window").numbers[s.fact]]
    if not gone:
        raise ValueError(f"window: no fact leaves a window of {story.window} tokens in these notes")
    return min(gone, key=lambda s: s.fact)


def out_of_reach(near: ToolboxStory) -> tuple[ToolboxStory, ToolboxStory, str]:
    """The same question after so much chat that a stack of window layers can't reach the fact any more; the same with another fact in the
    notes, and that fact. ValueError where the course has too little chat."""
    far = next((s for chat in range(1, MOST_CHAT + 1) if not (s := near.again(chat=chat)).of("sliding_window").reachable[s.fact]), None)
    if far is None:
        raise ValueError(f"window: no chat of this course takes a fact out of reach of {near.layers} layers with {near.window} tokens each")
    other = next(v for v in meeting.SLOTS[near.slot] if v != near.tokens[near.fact])
    words = [other if i == near.fact else word for i, word in enumerate(near.tokens[: near.text_tokens])]
    return far, far.again(text=" ".join(words)), other


# ---- the notes ----


def joined(tokens: Sequence[str]) -> str:
    """Tokens as a person writes them: a mark follows its word without a space."""
    return re.sub(r" ([.,:])", r"\1", " ".join(tokens))


def broken(words: str, width: float, *, size: float = SMALL) -> list[Label]:
    """Words in lines not wider than ``width``, where no word is."""
    lines: list[str] = []
    made: dict[str, Label] = {}
    for word in words.split():
        both = f"{lines[-1]} {word}" if lines else word
        made[both] = Label(both, size=size)
        if lines and made[both].width <= width:
            lines[-1] = both
        else:
            lines.append(word)
    return [made[line] if line in made else Label(line, size=size) for line in lines]


class Blank(VGroup):
    """The blank of a question, an empty card with its left edge at ``x``; the answer makes it wider, but not beyond the safe frame."""

    def __init__(self, x: float, y: float):
        self.x, self.y = x, y
        self.card = RoundedRectangle(corner_radius=0.08, width=1.5, height=0.42, stroke_color=ROLES["query"], stroke_width=2)
        super().__init__(self.card.move_to([x + 0.75, y, 0]))

    def fill(self, word: str) -> Change:
        """Write the answer."""
        fill = ROLES["value"]
        label = Label(word, size=SMALL, color=text_on(fill))
        before, width = self.card.width, max(1.5, label.width + 0.24)
        left = min(self.x, SAFE[0] - width)
        label.at(left + (width - label.width) / 2, self.y)
        self.submobjects = [self.card, label]

        def update(alpha: float) -> None:
            self.card.stretch_to_fit_width(before + alpha * (width - before))
            self.card.move_to([self.x + alpha * (left - self.x) + self.card.width / 2, self.y, 0]).set_fill(fill, alpha)
            label.set_opacity(coming(alpha))

        return Change(self, update, run_time=0.8)


class Reach(VGroup):
    """How far back a stack of window layers reads: a stair a layer, from the blank at the right edge leftwards.

    step: tokens that one layer looks back; far: tokens that must fit. ``mark`` says where a token stands.
    """

    def __init__(self, layers: int, step: int, *, far: int, top: float, color: str):
        self.unit, self.top, self.bottom = 2 * SAFE[0] / (1.03 * max(far, layers * step)), top, top - 0.36 * layers - 0.2
        super().__init__()
        for i in range(layers):
            bar = Rectangle(width=step * self.unit - 0.05, height=0.32, stroke_width=0, fill_color=color, fill_opacity=1)
            bar.move_to([SAFE[0] - (i + 0.5) * step * self.unit, top - 0.36 * i - 0.18, 0])
            name = Label(f"layer {layers - i}", size=SMALL, color=text_on(color))
            tick = Label(f"{(i + 1) * step}" if i else f"{step} tokens back", size=SMALL)
            tick.at(SAFE[0] - (i + 1) * step * self.unit - tick.width / 2, self.bottom - 0.1)
            self.add(VGroup(bar, name.at(bar.get_x() - name.width / 2, bar.get_y()), tick))

    def mark(self, word: str, back: int) -> VGroup:
        """A line through the stairs, ``back`` tokens before the blank, with the word above it."""
        x = SAFE[0] - back * self.unit
        line = DashedVMobject(Line([x, self.top + 0.05, 0], [x, self.bottom + 0.12, 0], color=ROLES["value"], stroke_width=5), num_dashes=9)
        label = Label(f"{word}: {back}", size=SMALL)
        return VGroup(line, label.at(max(-SAFE[0], x - label.width / 2), self.top + 0.27))


class NoteCard(VGroup):
    """A note on a card of its own."""

    def __init__(self, words: str, *, width: float = 2.3, height: float = 1.45):
        card = RoundedRectangle(corner_radius=0.1, width=width, height=height, stroke_color=THEME.line, stroke_width=2)
        lines = broken(words, width - 0.2)
        if len(lines) > 3 or max(line.width for line in lines) > width - 0.1:
            raise ValueError(f"facts: the note {words!r} is too long for the drawn card")
        text = VGroup(*(line.at(-line.width / 2, (len(lines) - 1) * LINE / 2 - i * LINE) for i, line in enumerate(lines)))
        super().__init__(card.set_fill(THEME.empty, 1), text)


class NoteStrip(VGroup):
    """The notes as text over a line of their tokens: what stands below a token belongs to it.

    notes: one part a note, to be faded in. question: the last part, with a blank that ``fill`` fills. ``x(i)``: the middle of a token.
    Raises ValueError when the words don't fit.
    """

    def __init__(self, story, *, top: float = SAFE[1] - 0.25):
        self.story, self.left = story, NAMES - SAFE[0]
        self.cell = (SAFE[0] - self.left) / len(story.tokens)
        self.bottom = top - 3 * LINE + 0.1
        named = {story.again(slot=slot).fact for slot in toolbox_slots()} | {story.fact}
        named |= {story.again(slot=slot, read=story.notes[-2][1]).fact for slot in toolbox_slots()} if len(story.notes) > 1 else set()
        segments = [*story.notes, (story.text_tokens, len(story.tokens))]
        self.notes = []
        for a, b in segments:
            color = ROLES["query"] if a == story.text_tokens else THEME.line
            lines = broken(joined(story.tokens[a:b]), (b - a) * self.cell - (0.2 if b < len(story.tokens) else 0.0))
            wide = max(line.width for line in lines)
            start = self.edge(a) if a else max(-SAFE[0], min(self.edge(a), self.edge(b) - wide - 0.3))  # the first may reach over the names
            if len(lines) > 3 or start + wide > self.edge(b) + 0.02:
                raise ValueError(f"facts: the note {joined(story.tokens[a:b])!r} is too long for the drawn row of notes")
            text = VGroup(*(line.at(start, top - i * LINE) for i, line in enumerate(lines)))
            rule = Line([self.edge(a) + 0.04, self.bottom, 0], [self.edge(b) - 0.04, self.bottom, 0], color=color, stroke_width=3)
            marks = (i for i in range(a, b) if i in named)
            thick = (Line([self.edge(i), self.bottom, 0], [self.edge(i + 1), self.bottom, 0], stroke_width=9) for i in marks)
            self.notes.append(VGroup(text, rule, *(line.set_color(ROLES["value"]) for line in thick)))
        *self.notes, self.question = self.notes
        self.blank = Blank(self.edge(story.text_tokens), top - len(self.question[0]) * LINE)
        self.question.add(self.blank)
        super().__init__()

    def edge(self, i: int) -> float:
        """The left edge of a token; of the one after the last, the right end."""
        return self.left + i * self.cell

    def x(self, i: int) -> float:
        return self.edge(i) + self.cell / 2

    def fill(self, word: str) -> Change:
        """Write the answer into the blank."""
        return self.blank.fill(word)
