"""The toolbox under the learner's hand: notes token by token, four ways to keep less, and what each still answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme
from k3viz.toolbox.figure import toolbox_picture
from k3viz.toolbox.story import IDEAS, LABELS, MOST_CHAT, MOST_LATENT, SLOTS, TEXT, WIDEST, text_length, toolbox_story
from minimodel import K3ForCausalLM
from minimodel.toolbox import GROUPS, LATENT, TECHNIQUES, WINDOW, toolbox_config

AUTO = "auto"


def toolbox_panel(
    *,
    text: str = TEXT,
    slot: str = "day",
    technique: str = "sliding_window",
    window: int = WINDOW,
    groups: int = GROUPS,
    latent: int = LATENT,
    chat: int = 0,
    models: Mapping[str, K3ForCausalLM] | None = None,
) -> Panel:
    """A live toolbox. All arguments as in ``toolbox_story``; the panel starts with them, all notes read. Returns a ``Panel``."""
    first = toolbox_story(text=text, slot=slot, technique=technique, window=window, groups=groups, latent=latent, chat=chat, models=models)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        settings = {name: values[name] for name in ("text", "slot", "technique")}
        settings |= {name: int(values[name]) for name in ("window", "groups", "latent", "chat")}
        settings |= {"layer": None if values["layer"] == AUTO else int(values["layer"]), "models": models}
        read = min(values["read"], text_length(values["text"], settings["chat"]))  # the notes may have become shorter
        story = toolbox_story(**settings, read=read)
        return Drawing(story, toolbox_picture(story, theme, title=False), story.sentence, frame=story.read, labels=story.labels)

    layers = range(1, toolbox_config(technique).num_hidden_layers + 1)
    controls = [
        Player("read", "Read", first.read, first.labels),
        Choice("slot", "Ask for the", slot, tuple((s, s) for s in SLOTS)),
        Choice("technique", "Look into", technique, tuple((t, f"{IDEAS[t]}: {LABELS[t]}") for t in TECHNIQUES)),
        Choice("layer", "Layer", AUTO, ((AUTO, "that reads the answer"), *((str(i), str(i)) for i in layers))),
        Slider("window", "Window, tokens", window, 2, WIDEST, 1),
        Choice("groups", "Copies that 4 heads share", str(groups), (("1", "1"), ("2", "2"), ("4", "4, one a head"))),
        Slider("latent", "Numbers in a latent", latent, 4, MOST_LATENT, 1),
        Slider("chat", "Sentences of chat before the question", chat, 0, MOST_CHAT, 1),
        Text("text", "Notes", text),
    ]
    return Panel(name="Toolbox: four ways to keep less", controls=controls, draw=draw)

