"""Gated MLA under the learner's hand: step through the cards, ask, hold the gate, by hand or learned; how many tokens at once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from k3viz.mla.figure import mla_picture
from k3viz.mla.forms import CONTEXT, MOST_AT_ONCE, count_forms
from k3viz.mla.learned import TEXT
from k3viz.mla.story import GATES, ROWS, MLAStory, mla_story
from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme, format_count
from minimodel import K3Config, K3ForCausalLM
from minimodel.pretrained import load_pretrained

BY_HAND, LEARNED = "by hand", "learned"


def mla_panel(
    *,
    slot: str = "day",
    gate: str = "learned",
    recency: float = 6.0,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
    config: K3Config | None = None,
    context: int = CONTEXT,
) -> Panel:
    """A live Gated MLA layer on the meeting notes.

    slot, gate, recency, text, config, context: as in ``mla_story``; the panel starts with them. model: a trained ``K3ForCausalLM`` to
    start with; without one the panel starts by hand, and loads the course's trained model when the learned cards are asked for.
    Returns a ``Panel``.
    """
    trained = lru_cache(maxsize=1)(load_pretrained)

    @lru_cache(maxsize=64)  # a model's run takes a moment; what a pass costs does not depend on it
    def learned(text: str, slot: str, gate: str) -> MLAStory:
        return mla_story(model=trained() if model is None else model, text=text, slot=slot, gate=gate)

    def story_of(values: dict[str, Any]) -> MLAStory:
        if values["mode"] == LEARNED:
            story = learned(values["text"], values["slot"], values["gate"])
        else:
            story = mla_story(slot=values["slot"], gate=values["gate"], recency=values["recency"])
        return replace(story, forms=count_forms(config, context, 1 << int(values["at_once"])))

    mode = BY_HAND if model is None else LEARNED
    start = story_of({"mode": mode, "text": text, "slot": slot, "gate": gate, "recency": recency, "at_once": 0})

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(values)
        position = min(values["position"], len(story.tokens) - 1)
        sentence = f"{story.sentence_at(position)} {story.forms_sentence}"
        hidden = ("recency",) if story.learned else ("text",)
        picture = mla_picture(story, position, theme, title=False)
        return Drawing(story, picture, sentence, frame=position, labels=story.tokens, hidden=hidden)

    at_once = tuple(format_count(1 << p) for p in range(MOST_AT_ONCE.bit_length()))
    controls = [
        Player("position", "Reading", len(start.tokens) - 1, start.tokens),
        Choice("mode", "Cards", mode, ((BY_HAND, "chosen by hand"), (LEARNED, "of the trained model"))),
        Choice("slot", "Asked for", slot, tuple((row, f"the {row}") for row in ROWS)),
        Choice("gate", "Output gate", gate, tuple((g, "as computed" if g == "learned" else f"held {g}") for g in GATES)),
        Slider("recency", "Preference for later notes", recency, 0.0, 24.0, 1.0),
        Slider("at_once", "Tokens read at once", 0, 0, len(at_once) - 1, 1, labels=at_once),
        Text("text", "The model reads", text),
    ]
    return Panel(name="Gated MLA: cards, heads and a gate", controls=controls, draw=draw, ahead=[{"mode": LEARNED}])
