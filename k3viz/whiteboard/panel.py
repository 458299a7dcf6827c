"""The whiteboard under the learner's hand: step and play, alpha, beta, key similarity, notes of one's own, by hand or learned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import plotly.graph_objects as go

from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme
from k3viz.whiteboard.figure import whiteboard_figure, whiteboard_picture
from k3viz.whiteboard.learned import TEXT, LearnedWhiteboard, Run, kda_heads, read, tell
from k3viz.whiteboard.learned_figure import learned_picture
from k3viz.whiteboard.story import FACTS, UPDATE, WhiteboardStory, notes_text, read_notes, whiteboard_story
from minimodel import K3Config, K3ForCausalLM
from minimodel.pretrained import load_pretrained

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
    ``K3ForCausalLM`` (default: the course's, loaded when it is first looked at), whose own states the panel can show instead; with a
    model given it starts there. text: what the model reads. Returns a ``Panel`` with ``.trace``, ``.figure``, ``.describe()``,
    ``.set({...})`` and ``.to_html(path)``. Raises ValueError naming the argument.
    """
    whiteboard_story(facts=facts, update=update, alpha=alpha, beta=beta, similarity=similarity)  # wrong arguments are named here
    facts, update = tuple(map(tuple, facts)), tuple(update)
    for name, pairs in (("facts", facts), ("update", (update,))):
        if any(":" in row or ";" in row + word for row, word in pairs):
            raise ValueError(f"{name}: in this panel a row can't hold a colon, nor a row or word a semicolon, got {notes_text(pairs)!r}")

    @lru_cache(maxsize=4)  # a story holds megabytes
    def by_hand(notes: str, change: str, alpha: float, beta: float, similarity: float) -> WhiteboardStory:
        *others, last = read_notes("update", change)
        if others:
            raise ValueError(f"update: write one change, got {len(others) + 1}")
        return whiteboard_story(facts=read_notes("facts", notes), update=last, alpha=alpha, beta=beta, similarity=similarity)

    @lru_cache(maxsize=2)  # a model's run takes a moment, and its states some megabytes
    def run(text: str) -> Run:
        return read(reader(), text)

    @lru_cache(maxsize=8)  # moving back to a head costs nothing
    def learned(text: str, head: str) -> LearnedWhiteboard:
        return tell(run(text), None if head == "auto" else tuple(int(x) - 1 for x in head.split(".")))

    @cache
    def reader() -> K3ForCausalLM:
        return load_pretrained("meeting") if model is None else model

    def story_of(values: dict[str, Any]) -> WhiteboardStory | LearnedWhiteboard:
        if values["mode"] == LEARNED:
            return learned(values["text"], values["head"])
        return by_hand(values["notes"], values["update"], values["alpha"], values["beta"], values["similarity"])

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        story = story_of(values)
        frame = min(values["frame"], len(story.labels) - 1)
        is_learned = isinstance(story, LearnedWhiteboard)
        picture = (learned_picture if is_learned else whiteboard_picture)(story, frame, theme, title=False)
        hidden = ("notes", "update", "alpha", "beta", "similarity") if is_learned else ("text", "head")
        return Drawing(story, picture, story.frame(frame).sentence, frame=frame, labels=story.labels, hidden=hidden)

    def export(values: dict[str, Any]) -> go.Figure:
        story = story_of(values)
        return whiteboard_figure(story=story, frame=min(values["frame"], len(story.labels) - 1), slider=True)

    written = notes_text(facts), notes_text((update,))
    story = learned(text, "auto") if model is not None else by_hand(*written, alpha, beta, similarity)
    heads = kda_heads(K3Config.meeting() if model is None else model.config)
    options = tuple((f"{layer + 1}.{h + 1}", f"layer {layer + 1}, head {h + 1}") for layer, h in heads)
    controls = [
        Player("frame", "Step", len(story.labels) - 1, story.labels),
        Choice("mode", "Board", BY_HAND if model is None else LEARNED, ((BY_HAND, "chosen by hand"), (LEARNED, "learned by the model"))),
        Slider("alpha", "Kept at each step, α", alpha, min(0.5, alpha), 1.0, 0.01),
        Slider("beta", "Write strength, β", beta, min(0.05, beta), 1.0, 0.05),
        Slider("similarity", "Similarity of the rows' keys", similarity, 0.0, 1.0, 0.05),
        Text("notes", "Your notes, as row: word; row: word", written[0]),
        Text("update", "Then this changes", written[1]),
        Choice("head", "Look into", "auto", (("auto", "the head that erases most"), *options)),
        Text("text", "The model reads", text),
    ]
    return Panel(name="Whiteboard: fade, erase, write", controls=controls, draw=draw, export=export, ahead=[{"mode": LEARNED}])
