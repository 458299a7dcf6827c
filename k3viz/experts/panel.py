"""Experts under the learner's hand: watch words find theirs in a trained model, then count a released model's loads and messages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from k3viz.experts.figure import experts_picture
from k3viz.experts.scale import SKEWS, TOKENS, experts_at_scale
from k3viz.experts.scale_figure import scale_picture
from k3viz.experts.story import TEXT, ExpertsRun, experts_story, read, tell
from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme, format_count
from minimodel import K3Config, K3ForCausalLM
from minimodel.pretrained import load_pretrained

VIEWS = {"words": "words in a trained model", "scale": "a released model's size"}


def experts_panel(
    *,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    config: K3Config | None = None,
    view: str = "words",
) -> Panel:
    """Live experts. model, text: as in ``experts_story``; config: as in ``experts_at_scale``; view: "words" or "scale" to start with.

    Returns a ``Panel``.
    """
    model = load_pretrained() if model is None else model
    config = K3Config.k3() if config is None else config
    first, large = experts_story(model=model, text=text), experts_at_scale(config=config)  # wrong arguments are named here
    E, trained, layers = model.config.num_experts, model.config.num_experts_per_token, first.layers
    widths = sorted({max(1, large.hidden // d) for d in (8, 4, 2, 1)} | {large.latent})
    ranks = [1 << p for p in range(len(large.loads).bit_length()) if 1 << p <= min(len(large.loads), 64)]
    in_words = ("token", "layer", "top_k", "shared", "text")
    at_scale = ("skew", "top_k_large", "latent", "shared_large", "ranks")

    @lru_cache(maxsize=32)  # a run of the model takes a moment; moving back costs nothing
    def run(text: str, top_k: int, shared: bool) -> ExpertsRun:
        return read(model, text, top_k, shared)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        if values["view"] == "scale":
            story = experts_at_scale(
                config=config, top_k=int(values["top_k_large"]), latent=widths[int(values["latent"])], shared=int(values["shared_large"]),
                ranks=ranks[int(values["ranks"])], skew=int(values["skew"]),
            )  # fmt: skip
            return Drawing(story, scale_picture(story, theme, title=False), story.sentence, frame=values["token"], hidden=in_words)
        text, layer = values["text"], layers[int(values["layer"])]
        now = run(text, int(values["top_k"]), values["shared"] == "yes")
        token = min(values["token"], len(now.tokens) - 1)
        story = tell(now, run(text, trained, True), layer, token)
        return Drawing(story, experts_picture(story, theme, title=False), story.sentence, frame=token, labels=now.tokens, hidden=at_scale)

    least = min(max(1, -(-2 * len(large.loads) // TOKENS)), large.top_k)  # below it some experts stay idle however even the load
    most = min(64, len(large.loads) - 1)
    controls = [
        Choice("view", "View", view, tuple(VIEWS.items())),
        Player("token", "Word", first.token, first.tokens),
        Slider("layer", "Layer", layers.index(first.layer), 0, len(layers) - 1, 1, labels=tuple(str(i + 1) for i in layers)),
        Slider("top_k", "Experts a word", trained, 1, E, 1),
        Choice("shared", "Shared experts", "yes", (("yes", "on, as trained"), ("no", "off"))),
        Text("text", "The model reads", text),
        Slider("skew", "Favorites (spread, logits)", large.skew, 0, len(SKEWS) - 1, 1, labels=tuple(f"{s:g}" for s in SKEWS)),
        Slider("top_k_large", "Experts a token", large.top_k, least, max(most, large.top_k), 1),
        Slider("latent", "Latent width", widths.index(large.latent), 0, len(widths) - 1, 1, labels=tuple(map(format_count, widths))),
        Slider("shared_large", "Shared experts (size)", large.shared, 0, max(4, large.shared), 1),
        Slider("ranks", "Ranks", ranks.index(large.ranks) if large.ranks in ranks else len(ranks) - 1, 0, len(ranks) - 1, 1,
               labels=tuple(map(str, ranks))),
    ]  # fmt: skip
    return Panel(name="Experts: who does the work", controls=controls, draw=draw)
