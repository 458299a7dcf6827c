"""The stage: the base scene and the parts that scenes are made of.

Lengths are manim units: the frame is 14.2 wide and 8 high, 60 pixels a unit at 480p. Text is never smaller than ``SMALL``
(20 pixels at 480p) and everything stays inside ``SAFE``, 4 % away from the frame's edge. Formulas are set by Typst, not LaTeX.
Where a number changes, the old text leaves before the new one comes: no number is ever shown that the trace doesn't hold.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

import numpy as np

from animations import missing

if line := missing():
    raise SystemExit(line)

from manim import (
    BOLD,
    DOWN,
    NORMAL,
    RESAMPLING_ALGORITHMS,
    Animation,
    FadeIn,
    FadeOut,
    Group,
    ImageMobject,
    Line,
    ManimColor,
    MathTypst,
    Mobject,
    Rectangle,
    RoundedRectangle,
    Scene,
    SurroundingRectangle,
    Text,
    VGroup,
    config,
    tempconfig,
)

from k3viz.theme import FONT, LIGHT, ROLES, diverging, format_number, text_on

THEME = LIGHT
SMALL, BODY, LARGE = 24, 26, 36  # font sizes; 24 is 20 pixels at 480p
SAFE = (6.5, 3.65)  # half width and half height of the part of the frame that is used


# ---- text ----


def installed_font() -> str:
    """The first of the theme's fonts that this machine has; "" lets Pango choose where none of them is installed."""
    names = [name.strip(" '") for name in FONT.split(",")]
    return next((name for name in names if name in Text.font_list()), "")


class Label(Text):
    """One line of text that knows where its capitals stand, so that labels side by side share a baseline."""

    def __init__(self, words: str, *, size: float = BODY, color: str = THEME.ink, bold: bool = False):
        with tempconfig({"pixel_width": 3840}):  # Pango wraps at the picture's width in pixels: a small picture would break lines
            super().__init__(words + "H", font=installed_font(), font_size=size, color=color, weight=BOLD if bold else NORMAL)
        capital = self[-1]
        self.remove(capital)
        self.text = self.original_text = words
        self.rise = capital.get_y() - self.get_y()
        self.initial_height = self.height  # manim derives font_size from it

    def at(self, x: float, y: float) -> Label:
        """Left edge at ``x``, capitals centered on ``y``."""
        return self.move_to([x + self.width / 2, y - self.rise, 0])


def paragraph(words: str, *, x: float, y: float, width: float, size: float = BODY, bold: bool = False) -> VGroup:
    """Lines of text not wider than ``width``, left edge at ``x``, the first line at ``y``."""
    columns, lines = len(words), [Label(words, size=size, bold=bold)]
    while max(each.width for each in lines) > width:
        columns -= 1
        lines = [Label(part, size=size, bold=bold) for part in textwrap.wrap(words, columns)]
    return VGroup(*(each.at(x, y - i * size / 50) for i, each in enumerate(lines)))


# ---- change ----


class Change(Animation):
    """Calls ``update(alpha)`` with alpha from 0 to 1, then ``done()``. ``mobject`` stays in one piece on the stage."""

    def __init__(self, mobject: Mobject, update: Callable[[float], None], done: Callable[[], None] = lambda: None, *, run_time: float = 1.0):
        super().__init__(mobject, run_time=run_time)
        self.update, self.done = update, done

    def create_starting_mobject(self) -> Mobject:
        return self.mobject  # manim would copy it, glyph by glyph, to interpolate from; ``update`` needs no copy

    def interpolate_mobject(self, alpha: float) -> None:
        self.update(self.rate_func(alpha))

    def finish(self) -> None:
        super().finish()
        self.now()

    def now(self) -> None:
        """The end state at once, without playing."""
        self.update(1.0)
        self.done()


def swap(holder: VGroup, new: VGroup) -> Change:
    """Replace what ``holder`` holds: the old leaves, then the new comes, so that they are never read through each other."""
    old = VGroup(*holder)
    holder.submobjects = [*old, *new]

    def update(alpha: float) -> None:
        old.set_opacity(leaving(alpha))
        new.set_opacity(coming(alpha))

    return Change(holder, update, lambda: holder.remove(*old), run_time=0.8)


def leaving(alpha: float) -> float:
    """Opacity of what goes: none left at half time."""
    return max(0.0, 1 - 2 * alpha)


def coming(alpha: float) -> float:
    """Opacity of what comes: from half time on, when the old is gone."""
    return max(0.0, 2 * alpha - 1)


def mix(a: str, b: str, alpha: float) -> ManimColor:
    return ManimColor(a).interpolate(ManimColor(b), alpha)


# ---- parts ----


class TokenRow(VGroup):
    """A sentence as a row of word cards. roles: word -> a role of the theme, whose color fills the word's card."""

    def __init__(self, sentence: str, roles: dict[str, str], *, x: float, y: float):
        super().__init__()
        for word in sentence.split():
            fill = ROLES.get(roles.get(word.strip(".,:;?")), THEME.empty)
            label = Label(word, color=text_on(fill)).at(x + 0.18, y)
            card = RoundedRectangle(corner_radius=0.1, width=label.width + 0.36, height=0.56, fill_color=fill, fill_opacity=1)
            card.set_stroke(THEME.line, 1.5).move_to([x + card.width / 2, y, 0])
            self.add(VGroup(card, label))
            x += card.width + 0.12


def legend(meanings: Sequence[tuple[str, str]], *, x: float, y: float) -> VGroup:
    """What colors mean: a square and its words for each (color, words) pair, from ``x`` to the right."""
    parts = VGroup()
    for color, words in meanings:
        label = Label(words, size=SMALL).at(x + 0.4, y)
        parts.add(Rectangle(width=0.28, height=0.28, stroke_width=0, fill_color=color, fill_opacity=1).move_to([x + 0.14, y, 0]), label)
        x += 0.75 + label.width
    return parts


class Formula(VGroup):
    """An equation whose terms light up as they act.

    terms: (name, Typst source) in reading order; a name of None is never lit. roles: name -> a role of the theme, its color.
    words: name -> the word that stands under the term at all times, so that color is not the only sign.
    """

    def __init__(self, terms: Sequence[tuple[str | None, str]], roles: dict[str, str], words: dict[str, str], *, x: float, y: float):
        source = " thick ".join(f"{{{{ {typst} : {name} }}}}" if name else typst for name, typst in terms)
        self.equation = MathTypst(source, font_size=36, color=THEME.ink)
        self.equation.move_to([x + self.equation.width / 2, y, 0])
        self.fills = {name: ROLES[role] for name, role in roles.items()}
        self.terms = {name: self.equation.select(name) for name in roles}
        self.spots = {name: SurroundingRectangle(term, buff=0.07, corner_radius=0.1, stroke_width=0) for name, term in self.terms.items()}
        below = min(spot.get_bottom()[1] for spot in self.spots.values()) - 0.22
        labels = {name: Label(word, size=SMALL) for name, word in words.items()}
        for name, label in labels.items():
            label.at(self.terms[name].get_x() - label.width / 2, below)
        super().__init__(*self.spots.values(), self.equation, *labels.values())
        self.lit = dict.fromkeys(roles, 0.0)
        self._paint(self.lit)

    def light(self, *names: str, run_time: float = 0.8) -> Change:
        """Light exactly these terms; none puts all lights out."""
        old, self.lit = self.lit, {name: float(name in names) for name in self.terms}
        new = self.lit
        return Change(self, lambda a: self._paint({name: old[name] + a * (new[name] - old[name]) for name in new}), run_time=run_time)

    def _paint(self, lit: dict[str, float]) -> None:
        for name, amount in lit.items():
            fill = self.fills[name]
            self.spots[name].set_fill(fill, amount)
            self.terms[name].set_color(mix(THEME.ink, text_on(fill), amount))


class Entry(VGroup):
    """One word on a board: the word, a bar as long as its strength, and the strength as a number."""

    def __init__(self, word: str, *, y: float, columns: tuple[float, float, float], unit: float):
        self.word = Label(word, bold=True)
        self.bar = Rectangle(width=1, height=0.22, stroke_width=0, fill_opacity=1)
        self.number: VGroup | Label = VGroup()
        self.columns, self.unit, self.strength, self.y = columns, unit, 0.0, y
        super().__init__(self.word, self.bar)

    def go(self, strength: float, y: float, color: str) -> Callable[[float], None]:
        """The update function that takes the entry to this strength and height; strength 0 takes it off the board."""
        from_strength, from_y, old = self.strength, self.y, self.number
        same = bool(strength and from_strength) and format_number(strength) == format_number(from_strength)
        new = old if same else Label(format_number(strength)) if strength else VGroup()
        self.strength, self.y, self.number = strength, y, new
        self.submobjects = [self.word, self.bar, new] if same else [self.word, self.bar, old, new]
        self.bar.set_color(color)

        def update(alpha: float) -> None:
            height = from_y + min(1.0, 2 * alpha) * (y - from_y)
            length = abs(from_strength + alpha * (strength - from_strength)) * self.unit
            self.word.at(self.columns[0], height)
            self.word.set_opacity(1.0 if strength and from_strength else coming(alpha) if strength else leaving(alpha))
            self.bar.stretch_to_fit_width(max(length, 1e-3)).move_to([self.columns[1] + length / 2, height, 0])
            if not same:
                old.set_opacity(leaving(alpha))
                new.set_opacity(coming(alpha))
            for number in (old, new):
                if len(number):
                    number.at(self.columns[2], height)

        return update


class Board(VGroup):
    """A whiteboard: labeled rows, and in each row the words that it says, with their strengths.

    rows: labels, top to bottom. words: every word that may appear, so that the columns are wide enough. limit: the strength of a
    full bar. labels: False leaves the row labels out, for a second board beside the first. Raises ValueError when it doesn't fit.
    """

    def __init__(
        self, rows: Sequence[str], words: Sequence[str], *, left: float, right: float, top: float, bottom: float, limit: float, labels: bool = True
    ):
        tall = (top - bottom) / len(rows)
        if tall < 0.8:
            raise ValueError(f"facts: the drawn board has room for {(top - bottom) / 0.8:.0f} rows, got {len(rows)}")
        frame = RoundedRectangle(corner_radius=0.12, width=right - left, height=top - bottom, stroke_color=THEME.line, stroke_width=2)
        super().__init__(frame.set_fill(THEME.empty, 1).move_to([(left + right) / 2, (top + bottom) / 2, 0]))
        self.middle = {row: top - (i + 0.5) * tall for i, row in enumerate(rows)}
        self.add(*(Line([left, y, 0], [right, y, 0], color=THEME.line, stroke_width=1) for y in (m + tall / 2 for m in list(self.middle.values())[1:])))
        x = left + 0.25
        if labels:
            names = VGroup(*(Label(row).at(x, y) for row, y in self.middle.items()))
            self.add(names)
            x += names.width + 0.4
        bar = x + max(Label(word, bold=True).width for word in words) + 0.2
        number = right - 0.25 - Label(format_number(limit)).width
        if number - bar < 0.8:
            raise ValueError(f"facts: the labels and words are too long for the drawn board: {', '.join([*rows, *words])}")
        self.columns, self.unit = (x, bar, number), (number - 0.2 - bar) / limit
        self.entries: dict[tuple[str, str], Entry] = {}

    def outline(self, row: str, right: float) -> Rectangle:
        """A frame around a row, from the board's left edge to ``right``, where the same row's band of the state ends."""
        left, tall = self.get_left()[0], 2 * (self.get_top()[1] - next(iter(self.middle.values())))
        frame = Rectangle(width=right - left, height=tall, color=ROLES["key"], stroke_width=4)
        return frame.move_to([(left + right) / 2, self.middle[row], 0])

    def tint(self, row: str, words: Sequence[str], color: str) -> Change:
        """Color the bars of some words in a row."""
        bars = [self.entries[row, word].bar for word in words]
        start = [bar.get_fill_color().to_hex() for bar in bars]

        def update(alpha: float) -> None:
            for bar, old in zip(bars, start, strict=True):
                bar.set_color(mix(old, color, alpha))

        return Change(self, update, run_time=0.8)

    def show(self, says: dict[str, list[tuple[str, float]]], *, color: str = THEME.muted, run_time: float = 1.5) -> Change:
        """Go to what each row now says: row -> (word, strength) pairs. Bars whose number changes take ``color``, the acting term's."""
        updates = []
        for row, middle in self.middle.items():
            targets = {word: (strength, middle + ((len(says[row]) - 1) / 2 - i) * 0.5) for i, (word, strength) in enumerate(says[row])}
            for word in targets:
                if (row, word) not in self.entries:
                    self.entries[row, word] = Entry(word, y=targets[word][1], columns=self.columns, unit=self.unit)
                    self.add(self.entries[row, word])
            for entry in (entry for (r, word), entry in self.entries.items() if r == row):
                strength, y = targets.get(entry.word.text, (0.0, entry.y))
                changed = format_number(strength) != format_number(entry.strength)
                updates.append(entry.go(strength, y, color if changed else THEME.muted))

        def update(alpha: float) -> None:
            for each in updates:
                each(alpha)

        def done() -> None:
            for place in [place for place, entry in self.entries.items() if not entry.strength]:
                self.remove(self.entries.pop(place))

        return Change(self, update, done, run_time=run_time)


class HeatMap(Group):
    """A [K, V] matrix as colored cells on the theme's signed scale. limit: the magnitude of full color."""

    def __init__(self, matrix: np.ndarray, *, limit: float, left: float, top: float, size: float):
        self.matrix, self.limit = matrix, limit
        self.image = ImageMobject(self._pixels(matrix))
        self.image.set_resampling_algorithm(RESAMPLING_ALGORITHMS["nearest"])
        self.image.stretch_to_fit_height(size).stretch_to_fit_width(size).move_to([left + size / 2, top - size / 2, 0])
        super().__init__(self.image, SurroundingRectangle(self.image, buff=0, color=THEME.line, stroke_width=2))

    def show(self, matrix: np.ndarray, *, run_time: float = 1.5) -> Change:
        """Go to another matrix, cell by cell along a straight line."""
        old, self.matrix = self.matrix, matrix

        def update(alpha: float) -> None:
            self.image.pixel_array = self._pixels(old + alpha * (matrix - old))

        return Change(self, update, run_time=run_time)

    def legend(self) -> VGroup:
        """The two ends of the color scale with their values, under the map."""
        (_, low), *_, (_, high) = diverging(THEME)
        ends = ((low, format_number(-self.limit)), (high, format_number(self.limit)))
        return legend(ends, x=self.get_left()[0], y=self.get_bottom()[1] - 0.35)

    def _pixels(self, matrix: np.ndarray) -> np.ndarray:
        stops, colors = zip(*diverging(THEME), strict=True)
        level = (np.clip(matrix / self.limit, -1, 1) + 1) / 2
        channels = np.array([ManimColor(color).to_rgb() for color in colors]).T
        rgb = np.stack([np.interp(level, stops, channel) for channel in channels], axis=-1)
        return np.dstack([rgb * 255, np.full(matrix.shape, 255)]).round().astype(np.uint8)


# ---- the scene ----


class StageScene(Scene):
    """A scene with an opening question, a caption line and a source line, on the theme's background."""

    def setup(self) -> None:
        config.disable_caching = True  # manim's cache hashes only the head of a large array: a changed trace could replay an old picture
        self.camera.background_color = ManimColor(THEME.paper)
        self.sentence, self.caption = VGroup(), VGroup()

    def ask(self, *lines: str) -> None:
        """The opening: the question alone on the stage, the last line in bold, long enough to be read."""
        question = VGroup(*(paragraph(each, x=0, y=0, width=2 * SAFE[0], size=LARGE, bold=each == lines[-1]) for each in lines))
        question.arrange(DOWN, buff=0.5)
        self.add(question)  # from the first frame on: it is also the picture that players show before the start
        self.wait(3.2)
        self.play(FadeOut(question), run_time=0.5)

    def read(self, sentence: str, roles: dict[str, str]) -> Change:
        """The sentence that the model reads now, at the head of the frame. roles: see ``TokenRow``."""
        return swap(self.sentence, TokenRow(sentence, roles, x=-SAFE[0], y=SAFE[1] - 0.28))

    def say(self, words: str, *, bold: bool = False) -> Change:
        """Change the caption."""
        return swap(self.caption, paragraph(words, x=-SAFE[0], y=-2.45, width=2 * SAFE[0], bold=bold))

    def cite(self, words: str) -> Label:
        """The source line, for the foot of the frame."""
        return Label(words, size=SMALL, color=THEME.muted).at(-SAFE[0], -3.48)
