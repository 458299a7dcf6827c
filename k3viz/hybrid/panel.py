"""One token's way through K3 under the learner's hand: which size, which layer, which part, by which cost, with which pattern."""

from __future__ import annotations

from typing import Any

from k3viz.hybrid.figure import hybrid_picture
from k3viz.hybrid.parts import DENSE_PARTS, ENDS, MIXER_PARTS, MOE_PARTS, READ, READ_AGAIN
from k3viz.hybrid.story import LENSES, LONGEST, SCALES, hybrid_story
from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme, format_count
from minimodel import K3Config, K3ForCausalLM

COSTLIEST = "costliest"


def hybrid_panel(
    *,
    scale: str = "2.8T",
    pattern: str | None = None,
    at: int | None = None,
    part: str | None = None,
    lens: str = "compute",
    tokens: int = 131_072,
    config: K3Config | None = None,
    model: K3ForCausalLM | None = None,
) -> Panel:
    """A live block diagram with a cost lens. All arguments as in ``hybrid_story``; the panel starts with them.

    tokens: the slider stops at powers of two and starts at the one below. Returns a ``Panel``.
    """
    own = config is not None or model is not None
    first = hybrid_story(scale=scale, pattern=pattern, at=at, part=part, lens=lens, tokens=tokens, config=config, model=model)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        settings = {"pattern": values["pattern"].strip(), "lens": values["lens"], "tokens": 1 << int(values["tokens"])}
        settings |= {"config": config, "model": model} if own else {"scale": values["scale"]}
        top = hybrid_story(**settings, at=0)
        here = min(values["at"], len(top.steps) - 1)
        wanted = values["part"]
        has = wanted in [p.name for p in top.steps[here].parts]
        story = hybrid_story(**settings, at=here, part=wanted if has else None)
        said = story.sentence
        if not has and wanted != COSTLIEST:
            said = f"This step has no such part ({options[wanted]}), so its costliest is shown. {said}"
        return Drawing(story, hybrid_picture(story, theme, title=False), said, frame=here, labels=story.labels)

    options = {COSTLIEST: "the costliest part", **_options()}
    controls = [
        Player("at", "The token is in", first.at, first.labels),
        Choice("lens", "Cost", lens, tuple((name, text) for name, (_, text) in LENSES.items())),
        Choice("part", "Look into (or click a part)", part or COSTLIEST, tuple(options.items())),
        Slider("tokens", "Tokens read", tokens.bit_length() - 1, 0, LONGEST.bit_length() - 1, 1,
               labels=tuple(format_count(1 << p) for p in range(LONGEST.bit_length()))),
        Text("pattern", "Pattern of layers, repeated (K: KDA, M: MLA)", first.pattern),
    ]  # fmt: skip
    if not own:
        controls.insert(1, Choice("scale", "Size", scale, tuple((name, label) for name, (label, _) in SCALES.items())))
    ahead = [] if own else [{"scale": name} for name in SCALES]
    return Panel(name="Hybrid: one token's way, and what it costs", controls=controls, draw=draw, ahead=ahead)


def _options() -> dict[str, str]:
    """Every part of every step, each with a label of its own."""
    groups = [*ENDS.values(), READ, *MIXER_PARTS.values(), READ_AGAIN, DENSE_PARTS, MOE_PARTS]
    found: dict[str, str] = {}
    for group in groups:
        for name, (label, _) in group.items():
            found.setdefault(name, f"{label}, before the feed-forward" if name.endswith("_2") else label)
    return found
