"""The dials under the learner's hand: move all 128, change the gate, set the one dial, follow one, step through the words."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from k3viz.decay.figure import FOLLOWED, decay_picture
from k3viz.decay.learned import read_heads
from k3viz.decay.story import AGE, CHANNELS, GATES, ONE_DIAL, SHIFT, TEXT, DecayStory, by_hand, choose, split, tell, tokens_text
from k3viz.panel import Choice, Drawing, Panel, Player, Slider, Text
from k3viz.theme import Theme, format_count
from minimodel import K3ForCausalLM
from minimodel.pretrained import load_pretrained

BY_HAND = "by hand"
HALF_LIVES = tuple(2.0**p for p in range(-2, 13))  # of the one dial, in tokens
AGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 4000)  # to ask the clock for


def decay_panel(*, model: K3ForCausalLM | None = None, text: str = TEXT, gate: str | None = None, shift: float = 0.0) -> Panel:
    """Live dials: 128 decays beside one for all, on a note that is read word by word.

    model: a trained ``K3ForCausalLM`` to look into; with it the panel starts at its dials. Without it the panel starts with dials
    chosen by hand, and can switch to the course's own trained model. text, gate, shift: as in ``decay_story``.
    """
    learned = model is not None
    model = load_pretrained("meeting") if model is None else model

    @lru_cache(maxsize=4)  # one run of the model a text
    def heads(text: str) -> dict[str, Any]:
        read = read_heads(model, text)
        return {"auto": choose(read, text, None), **{f"{layer + 1}.{h + 1}": head for (layer, h), head in read.items()}}

    @lru_cache(maxsize=4)  # a story holds megabytes
    def story_of(look: str, text: str, gate: str | None, shift: float, one: float) -> DecayStory:
        return tell(text, by_hand(text) if look == BY_HAND else heads(text)[look], gate, shift, one)

    def draw(values: dict[str, Any], theme: Theme) -> Drawing:
        one, age = HALF_LIVES[int(values["one"])], AGES[int(values["age"])]
        story = story_of(values["look"], values["text"], values["gate"], float(values["shift"]), one)
        now = min(values["now"], len(story.tokens) - 1)
        picture = decay_picture(story, now, age, min(int(values["follow"]), story.g.shape[1]), theme, title=False)
        return Drawing(story, picture, story.sentence(now, age), frame=now, labels=story.tokens)

    words = split(text)
    gate = story_of.__wrapped__("auto" if learned else BY_HAND, text, gate, shift, ONE_DIAL).gate  # the cache wants hashable arguments
    places = [name for name in heads(text) if name != "auto"]  # read now, so that the first switch is as quick as the others
    named = tuple((name, "the model: layer {}, head {}".format(*name.split("."))) for name in places)
    controls = [
        Player("now", "Read so far", len(words) - 1, words),
        Choice("look", "Dials", "auto" if learned else BY_HAND, ((BY_HAND, "as K3 starts them, keys by hand"),
               ("auto", "the model: the head that keeps facts best"), *named)),
        Choice("gate", "Gate", gate, tuple(GATES.items())),
        Slider("shift", "Turn all dials, z", shift, -SHIFT, SHIFT, 0.5),
        Slider("follow", "Follow dial", FOLLOWED, 1, CHANNELS, 1),
        Slider("one", "One dial's half-life", HALF_LIVES.index(ONE_DIAL), 0, len(HALF_LIVES) - 1, 1,
               labels=tuple(f"{tokens_text(h)} tokens" for h in HALF_LIVES)),
        Slider("age", "Ask for the age", AGES.index(AGE), 0, len(AGES) - 1, 1, labels=tuple(f"{format_count(a)} tokens" for a in AGES)),
        Text("text", "The note", text),
    ]  # fmt: skip
    return Panel(name="Decay: 128 dials and one", controls=controls, draw=draw)
