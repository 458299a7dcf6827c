"""Balancing under the learner's hand: drag the report's cut-offs, then let three rules race on a live router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from k3viz.balancing.figure import SHOWS, balancing_picture
from k3viz.balancing.race import STEPS, BalancingRace, balancing_race, run_loss, run_quantile, run_sign
from k3viz.balancing.race_figure import race_picture
from k3viz.balancing.story import CUTOFFS, LENGTHS, SCALE, balancing_story
from k3viz.panel import Choice, Drawing, Panel, Player, Slider
from k3viz.theme import Theme, plural

VIEWS = {"example": "the report's example", "race": "a live router: three rules"}
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
COEFFICIENTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def balancing_panel(
    *,
    scores: Sequence[Sequence[float]] = LENGTHS,
    scale: float = SCALE,
    how: str = "figure",
    show: str = "scores",
    view: str = "example",
) -> Panel:
    """Live balancing. scores, scale: as in ``balancing_story``; how: where the cut-offs start ("hand": at zero); show: "scores" or
    "margins"; view: "example" or "race". Returns a ``Panel``.
    """
    n = np.shape(scores)[1] if np.ndim(scores) == 2 else 2
    first = balancing_story(scores=scores, scale=scale, how=how, cutoffs=[0.0] * n if how == "hand" else None)  # names wrong arguments
    cuts = [f"cut_{j}" for j in range(n)]
    raced = ("step", "top_k", "skew", "rate", "coefficient")
    labels = tuple("before any update" if s == 0 else f"after {s} {plural('update', s)}" for s in range(STEPS))

    quantile, sign, loss = (lru_cache(maxsize=16)(run) for run in (run_quantile, run_sign, run_loss))  # each reruns alone

    def race(values: dict[str, Any]) -> BalancingRace:
        top_k, skew, step = int(values["top_k"]), values["skew"], min(values["step"], STEPS - 1)
        rate, coefficient = RATES[int(values["rate"])], COEFFICIENTS[int(values["coefficient"])]
        runs = {"quantile": quantile(top_k, skew), "sign": sign(top_k, skew, rate), "loss": loss(top_k, skew, coefficient)}
        return BalancingRace(runs, top_k, skew, rate, coefficient, step)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        if values["view"] == "race":
            story = race(values)
            hidden = ("how", "show", *cuts)
            return Drawing(story, race_picture(story, theme, title=False), story.sentence, frame=story.step, labels=labels, hidden=hidden)
        how = values["how"]
        by_hand = [float(values[cut]) for cut in cuts] if how == "hand" else None
        story = balancing_story(scores=scores, scale=scale, how=how, cutoffs=by_hand)
        hidden = (*raced, *(() if how == "hand" else cuts))
        return Drawing(story, balancing_picture(story, values["show"], theme, title=False), story.sentence,
                       frame=min(values["step"], STEPS - 1), labels=labels, hidden=hidden)  # fmt: skip

    start = balancing_race()  # the defaults of the race
    low, high, step = _reach(first.scores)
    controls = [
        Choice("view", "View", view, tuple(VIEWS.items())),
        Choice("how", "Cut-offs", how, tuple(CUTOFFS.items())),
        Choice("show", "Bars show", show, tuple(SHOWS.items())),
        *[Slider(cut, f"Cut-off of E{j + 1}", 0.0, low, high, step) for j, cut in enumerate(cuts)],
        Player("step", "Optimizer step", start.step, labels),
        Slider("top_k", "Experts a token", start.top_k, 1, 8, 1),
        Slider("skew", "Favorites (spread, logits)", start.skew, 0.0, 3.0, 0.25),
        Slider("rate", "Rate of the sign rule", RATES.index(start.rate), 0, len(RATES) - 1, 1, labels=tuple(f"{r:g}" for r in RATES)),
        Slider("coefficient", "Coefficient of the loss", COEFFICIENTS.index(start.coefficient), 0, len(COEFFICIENTS) - 1, 1,
               labels=tuple(f"{c:g}" for c in COEFFICIENTS)),
    ]  # fmt: skip
    return Panel(name="Balancing: cut-offs that even the load", controls=controls, draw=draw, ahead=[{"view": "race"}])


def _reach(scores: np.ndarray) -> tuple[float, float, float]:
    """Ends and step of a cut-off's slider: a quarter of the spread below zero, up to the largest score, a round step."""
    spread = float(scores.max()) or 1.0
    step = 10.0 ** np.floor(np.log10(spread / 20))
    return float(-np.ceil(spread / 4 / step) * step), float(np.ceil(spread / step) * step), float(step)
