"""Serving under the learner's hand: step through an agent's session, change its sizes, break the prefix and see the bill."""

from __future__ import annotations

from typing import Any

from k3viz.panel import Choice, Drawing, Panel, Player, Slider
from k3viz.serving.figure import serving_picture
from k3viz.serving.story import BREAKS, MOST, SCALE, SNAPSHOTS, TURNS, ServingStory, serving_story
from k3viz.theme import Theme, format_count
from minimodel import K3Config


def serving_panel(
    *,
    turns: int = 8,
    system: int = 16_384,
    message: int = 3_840,
    output: int = 1_024,
    broken: str = "nothing",
    at: int | None = None,
    snapshots: str = "answers",
    config: K3Config | None = None,
) -> Panel:
    """A live session of an agent; arguments as in ``serving_story``, and the panel starts with them. Returns a ``Panel``."""
    story = serving_story(turns=turns, system=system, message=message, output=output, broken=broken, at=at, snapshots=snapshots,
                          config=config)  # fmt: skip

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        n = int(values["turns"])
        story = serving_story(
            turns=n, system=int(values["system"]), message=int(values["message"]), output=int(values["output"]), broken=values["broken"],
            at=min(int(values["at"]), n), snapshots=values["snapshots"], config=config,
        )  # fmt: skip
        turn = min(values["turn"], n - 1)
        hidden = () if values["broken"] in ("edit", "summary") else ("at",)
        picture = serving_picture(story, turn, theme, title=False)
        return Drawing(story, picture, story.sentence_at(turn), frame=turn, labels=labels_of(story), hidden=hidden)

    def tokens(name: str, label: str, value: int) -> Slider:
        labels = tuple(format_count(x) for x in range(SCALE, MOST[name] + 1, SCALE))
        return Slider(name, label, value, SCALE, MOST[name], SCALE, labels=labels)

    controls = [
        Player("turn", "Turn", turns - 1, labels_of(story)),
        Choice("broken", "What breaks the prefix", broken, tuple(BREAKS.items())),
        Slider("at", "at turn", story.at, 2, TURNS, 1),
        Choice("snapshots", "Snapshots", snapshots, tuple(SNAPSHOTS.items())),
        Slider("turns", "Turns", turns, 2, TURNS, 1),
        tokens("system", "Instructions and tools", system),
        tokens("message", "New at each turn", message),
        tokens("output", "Answer", output),
    ]  # fmt: skip
    return Panel(name="Serving: a session, its prefix cache and its bill", controls=controls, draw=draw)


def labels_of(story: ServingStory) -> tuple[str, ...]:
    return tuple(f"{format_count(t.prompt)} tokens sent" for t in story.turns)
