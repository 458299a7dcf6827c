"""Muon under the learner's hand: step through Newton-Schulz, make one head stronger, let heads share more or fewer directions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from k3viz.muon.figure import muon_picture
from k3viz.muon.story import HEADS, MUON_STEPS, STEPS, WIDTH, MuonStory, model_gradient, muon_story, orthogonalized
from k3viz.panel import Choice, Drawing, Panel, Player, Slider
from k3viz.theme import Theme, plural
from minimodel import K3ForCausalLM
from minimodel.pretrained import load_pretrained

STRENGTHS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
CHOSEN, TRAINED = "chosen", "trained"


def muon_panel(*, strength: float = 10, directions: int = 12, step: int = MUON_STEPS, model: K3ForCausalLM | None = None) -> Panel:
    """A live Newton-Schulz iteration, on one matrix and head by head.

    strength, directions: as in ``muon_story``; the slider stops at 1, 2, 3, 5, 10 ... 1000, any other strength starts at the stop nearest
    to it. step: where the player starts, 0 to 8. model: whose gradient can be looked at, and is at the start; without one it is the
    course's trained model, loaded when it is asked for. Returns a ``Panel``.
    """
    muon_story(strength=strength, directions=directions)  # wrong arguments are named here
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEPS:
        raise ValueError(f"step must be a whole number from 0 to {STEPS}, got {step!r}")
    own = lru_cache(maxsize=1)(lambda: model_gradient(load_pretrained() if model is None else model))

    @lru_cache(maxsize=64)
    def story_of(source: str, strength: int, directions: int) -> MuonStory:
        if source == TRAINED:
            gradient, where = own()
            return orthogonalized(gradient, float(strength), where)
        return muon_story(strength=strength, directions=directions)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(values["source"], STRENGTHS[int(values["strength"])], int(values["directions"]))
        at = min(values["step"], STEPS)
        hidden = ("directions",) if values["source"] == TRAINED else ()
        sentence = f"{story.sentence_at(at)} Gradient: {story.source}."
        return Drawing(story, muon_picture(story, at, theme, title=False), sentence, frame=at, labels=labels, hidden=hidden)

    labels = ("normalized only", *(f"{n} Newton-Schulz {plural('step', n)}" for n in range(1, STEPS + 1)))
    nearest = min(range(len(STRENGTHS)), key=lambda i: abs(STRENGTHS[i] - strength))
    controls = [
        Player("step", "Orthogonalize", step, labels),
        Choice("source", "Gradient", CHOSEN if model is None else TRAINED,
               ((CHOSEN, f"chosen, {HEADS} heads"), (TRAINED, "the trained model's own"))),
        Slider("strength", "Head 1 made stronger", nearest, 0, len(STRENGTHS) - 1, 1, labels=tuple(f"{k} times" for k in STRENGTHS)),
        Slider("directions", "Directions that heads share", directions, 1, WIDTH, 1),
    ]  # fmt: skip
    return Panel(name="Muon: one matrix, or head by head", controls=controls, draw=draw, ahead=[{"source": TRAINED}])
