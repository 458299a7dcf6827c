"""The stage: the base scene and the parts that scenes are made of.

Lengths are manim units: the frame is 14.2 wide and 8 high, 60 pixels a unit at 480p. Text is never smaller than ``SMALL``
(20 pixels at 480p) and everything stays inside ``SAFE``, 4 % away from the frame's edge. Formulas are set by Typst, not LaTeX.
Where a number changes, the old text leaves before the new one comes: no number is ever shown that the trace doesn't hold.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from animations import missing

if line := missing():
    raise SystemExit(line)

from manim import (
    BOLD,
    DOWN,
    NORMAL,
    Animation,
    FadeOut,
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

from k3viz.theme import FONT, LIGHT, ROLES, text_on

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
    whole = re.sub(r"(?<=\d) (?=%|[kMGT]?B\b)", "\xa0", words)  # a number and its unit stay on one line
    lines = [Label(words, size=size, bold=bold)]
    columns = int(len(words) * width / lines[0].width) + 3  # a first guess from the mean width of a letter, then fewer until it fits
    made: dict[str, Label] = {}  # a label costs tens of milliseconds, and most breaks come again with one column less
    while max(each.width for each in lines) > width:
        parts = [part.replace("\xa0", " ") for part in textwrap.wrap(whole, columns)]
        made |= {part: Label(part, size=size, bold=bold) for part in parts if part not in made}
        lines, columns = [made[part] for part in parts], columns - 1
    return VGroup(*(each.at(x, y - i * size / 50) for i, each in enumerate(lines)))


# ---- change ----


class Change(Animation):
    """Calls ``update(alpha)`` with alpha from 0 to 1, then ``done()``. ``mobject`` stays in one piece on the stage."""

    def __init__(
        self, mobject: Mobject, update: Callable[[float], None], done: Callable[[], None] = lambda: None, *, run_time: float = 1.0
    ):
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


# ---- the scene ----


class StageScene(Scene):
    """A scene with an opening question, a caption line and a source line, on the theme's background."""

    def setup(self) -> None:
        config.disable_caching = True  # manim's cache hashes only the head of a large array: a changed trace could replay an old picture
        self.camera.background_color = ManimColor(THEME.paper)
        self.sentence, self.caption = VGroup(), VGroup()

    def tear_down(self) -> None:
        if path := self.renderer.file_writer.output_plan.primary_artifact:
            print(f"{type(self).__name__}: {path}", flush=True)  # manim says it too, but among a hundred other lines

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
        return swap(self.caption, paragraph(words, x=-SAFE[0], y=-2.4, width=2 * SAFE[0], bold=bold))

    def cite(self, words: str) -> Label:
        """The source line, for the foot of the frame."""
        return Label(words, size=SMALL, color=THEME.muted).at(-SAFE[0], -3.48)
