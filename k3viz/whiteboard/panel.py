"""The whiteboard under the learner's hand: step and play, alpha, beta, key similarity, another word, by hand or learned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme
from k3viz.whiteboard.figure import whiteboard_figure, whiteboard_picture
from k3viz.whiteboard.learned import TEXT, LearnedWhiteboard, learned_story
from k3viz.whiteboard.learned_figure import learned_picture
from k3viz.whiteboard.story import FACTS, UPDATE, WhiteboardStory, whiteboard_story
from minimodel import K3ForCausalLM

BY_HAND, LEARNED = "by hand", "learned"


def whiteboard_panel(
    *,
    facts: Sequence[tuple[str, str]] = FACTS,
    update: tuple[str, str] = UPDATE,
    alpha: float = 0.95,
    beta: float = 0.9,
    similarity: float = 0.0,
    model: K3ForCausalLM | None = None,
    text: str = TEXT,
) -> Panel:
    """A live whiteboard: play through fade, erase and write; the additive update runs beside it.

    facts, update, alpha, beta, similarity: as in ``whiteboard_story``; the panel starts with them. model: a trained
    ``K3ForCausalLM``; with it the panel can switch from the story by hand to the model's own states, and starts there. text:
    what the model reads. Returns a ``Panel`` with ``.trace``, ``.figure``, ``.describe()``, ``.set({...})`` and ``.to_html(path)``.
    """
    facts, row = tuple(map(tuple, facts)), update[0]

    @lru_cache(maxsize=4)  # a story holds megabytes
    def by_hand(word: str, alpha: float, beta: float, similarity: float) -> WhiteboardStory:
        return whiteboard_story(facts=facts, update=(row, word), alpha=alpha, beta=beta, similarity=similarity)

    @lru_cache(maxsize=8)  # a model's run takes a moment; moving back to a text or head costs nothing
    def learned(text: str, head: str) -> LearnedWhiteboard:
        chosen = None if head == "auto" else tuple(int(x) - 1 for x in head.split("."))
        return learned_story(model=model, text=text, head=chosen)

    def story_of(values: dict[str, Any]) -> WhiteboardStory | LearnedWhiteboard:
        if values.get("mode", BY_HAND) == LEARNED:
            return learned(values["text"], values["head"])
        return by_hand(values["word"], values["alpha"], values["beta"], values["similarity"])

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(values)
        frame = min(values["frame"], len(story.labels) - 1)
        is_learned = isinstance(story, LearnedWhiteboard)
        picture = (learned_picture if is_learned else whiteboard_picture)(story, frame, theme, title=False)
        hidden = ("word", "alpha", "beta", "similarity") if is_learned else ("text", "head")
        return Drawing(story, picture, story.frame(frame).sentence, frame=frame, labels=story.labels, hidden=hidden)

    def export(values: dict[str, Any]) -> go.Figure:
        story = story_of(values)
        return whiteboard_figure(story=story, frame=min(values["frame"], len(story.labels) - 1), slider=True)

    story = learned(text, "auto") if model is not None else by_hand(update[1], alpha, beta, similarity)
    controls = [
        Player("frame", "Step", len(story.labels) - 1, story.labels),
        Slider("alpha", "Kept at each step, α", alpha, min(0.5, alpha), 1.0, 0.01),
        Slider("beta", "Write strength, β", beta, min(0.05, beta), 1.0, 0.05),
        Slider("similarity", "Similarity of the rows' keys", similarity, 0.0, 1.0, 0.05),
        Text("word", f"The {row} changes to", update[1]),
    ]
    if model is not None:
        heads = tuple((f"{layer + 1}.{h + 1}", f"layer {layer + 1}, head {h + 1}") for layer, h in story.heads)
        controls += [
            Choice("mode", "Board", LEARNED, ((BY_HAND, "chosen by hand"), (LEARNED, "learned by the model"))),
            Choice("head", "Look into", "auto", (("auto", "the head that erases most"), *heads)),
            Text("text", "The model reads", text),
        ]
    return Panel(name="Whiteboard: fade, erase, write", controls=controls, draw=draw, export=export)
