"""Serving: hits follow the rule of block ends and snapshots, the bill is the price list's, a broken prefix shows in the picture."""
import numpy as np
import pytest
import torch

from k3viz import serving_figure, serving_panel, serving_story
from k3viz.serving.story import BLOCK, COPY, SCALE, SNAPSHOTS, SPEED, prompts, tiny_model
from k3viz.theme import DARK
from minimodel import K3Config, PrefixCache, cache_bytes
from minimodel.accounting import flops
from minimodel.facts import Serving

STORY = serving_story()
SIZES = {"system": 4_096, "message": 1_280, "output": 768}


def rule(turns, broken="nothing", at=None, snapshots="answers"):
    """Hits by the rule alone, without a model: the longest shared prefix that ends at a snapshot, in tokens of the session."""
    b = BLOCK // SCALE
    small = {name: n // SCALE for name, n in SIZES.items()}
    known, hits = set(), []
    for prompt, answer in prompts(turns, *small.values(), broken, at or turns // 2 + 1):
        ids = tuple(prompt.tolist())
        ends = [n for n in range(b, len(ids), b) if ids[:n] in known]
        hits.append(SCALE * max(ends, default=0))
        known.add(ids[: (len(ids) - 1) // b * b])
        if snapshots != "prompts":
            whole = ids + tuple(answer.tolist())
            known.add(whole[: len(whole) // b * b])
        if snapshots == "all":
            known.add(ids[: small["system"] // b * b])
    return hits


@pytest.mark.parametrize("snapshots", SNAPSHOTS)
@pytest.mark.parametrize("broken", ["nothing", "clock", "edit", "summary"])
def test_hits_are_those_of_the_rule(broken, snapshots):
    story = serving_story(turns=5, broken=broken, snapshots=snapshots, **SIZES)
    assert [t.hit for t in story.turns] == rule(5, broken, snapshots=snapshots)
    assert all(t.hit % BLOCK == 0 and t.hit < t.prompt for t in story.turns)


def test_prompts_hold_the_whole_history():
    for i, t in enumerate(STORY.turns):
        assert t.prompt == 16_384 + 3_840 * (i + 1) + 1_024 * i and t.read + t.hit == t.prompt


def test_resumed_logits_are_those_of_a_cold_run():
    for broken in ("nothing", "edit"):
        assert serving_story(broken=broken).off < 1e-12


@pytest.mark.parametrize("broken", ["nothing", "edit", "clock"])
def test_snapshots_and_blocks_are_what_the_cache_holds(broken):
    story = serving_story(broken=broken)
    size = cache_bytes(tiny_model().config, 1, dtype=torch.float64)
    last = story.turns[-1]
    assert story.nbytes == last.snapshots * size.fixed + last.stored // SCALE * size.per_token
    k3 = cache_bytes(K3Config.k3(), 1)
    assert story.kept_bytes() == last.snapshots * k3.fixed + last.stored * k3.per_token


def test_a_second_cache_finds_the_same_prefixes():
    """The story's hits, looked up once more in a cache of our own."""
    prefix = PrefixCache(tiny_model(), block_tokens=BLOCK // SCALE)
    hits = []
    for prompt, _ in prompts(4, 16, 5, 3, "nothing", 0):
        hits.append(SCALE * prefix.lookup(prompt)[1])
        prefix.read(prompt)
    assert hits == [t.hit for t in serving_story(turns=4, snapshots="prompts", **SIZES).turns]


def test_the_bill_is_the_price_list_times_the_tokens():
    cached, price, out = Serving.cached_price.value, Serving.input_price.value, Serving.output_price.value
    total = sum(cached * t.hit + price * t.read + out * t.output for t in STORY.turns) / 1e6
    assert STORY.bill() == pytest.approx(total)
    assert STORY.bill(cached=False) == pytest.approx(sum(price * t.prompt + out * t.output for t in STORY.turns) / 1e6)
    clock = serving_story(broken="clock")
    assert clock.bill() == pytest.approx(clock.bill(cached=False)) and clock.hit_rate() == 0


def test_an_edit_costs_once_and_a_snapshot_after_the_instructions_saves_them():
    edit, apart = serving_story(broken="edit"), serving_story(broken="edit", snapshots="all")
    assert [t.hit for t in edit.turns].count(0) == 2 and edit.turns[edit.at - 1].hit == 0
    assert apart.turns[apart.at - 1].hit == 16_384
    assert STORY.bill() < apart.bill() < edit.bill()
    assert [t.cost for t in edit.unbroken] == [t.cost for t in STORY.turns]


def test_the_latency_model_is_as_stated():
    k3, t = K3Config.k3(), STORY.turns[-1]
    work = flops(k3, t.prompt).per_token * t.prompt - flops(k3, t.hit).per_token * t.hit
    assert t.seconds == pytest.approx(work / SPEED + cache_bytes(k3, t.hit).total / COPY)
    assert STORY.turns[0].seconds == STORY.turns[0].uncached_seconds


# ---- figure and panel ----

def drawn(figure, name, axis="y"):
    return list(next(t for t in figure.data if t.name == name and (t.yaxis or "y") == axis).y)


def test_the_figure_draws_the_storys_numbers():
    story = serving_story(broken="edit")
    figure = serving_figure(story=story)
    assert drawn(figure, "resumed") == [t.hit for t in story.turns] and drawn(figure, "read") == [t.read for t in story.turns]
    np.testing.assert_allclose(drawn(figure, "this session", "y2"), [story.bill(i) for i in range(8)], atol=1e-4)
    np.testing.assert_allclose(drawn(figure, "no cache", "y3"), [t.uncached_seconds for t in story.turns], atol=1e-4)
    ends = [end for t in story.turns for end in t.checkpoints]
    assert drawn(figure, "snapshots") == ends
    notes = " ".join(note.text for note in figure.layout.annotations)
    assert "$0.30" in notes and "$3.00" in notes and "$15.00" in notes and "chosen" in notes
    assert len(drawn(serving_figure(story=story, turn=2), "read")) == 3


@pytest.mark.parametrize("change", [{"turns": 6}, {"system": 1024}, {"message": 256}, {"output": 2048}, {"broken": "edit"},
                                    {"broken": "summary"}, {"snapshots": "prompts"}])
def test_another_input_gives_another_figure(change):
    assert serving_figure(story=serving_story(**change)) != serving_figure()


def test_figures_are_the_same_twice_and_small():
    assert serving_figure().to_json() == serving_figure().to_json()
    assert len(serving_figure(story=serving_story(turns=10, broken="edit")).to_json()) < 60_000


def test_the_panel_answers_to_its_controls():
    panel = serving_panel()
    assert len(panel.controls[0]["labels"]) == 8 and panel.values["turn"] == 7
    assert panel.hidden == ["at"] and "from the cache" in panel.describe()
    bill = panel.trace.bill()
    panel.set({"broken": "edit", "at": 4})
    assert panel.hidden == [] and panel.trace.turns[3].hit == 0 and panel.trace.bill() > bill
    panel.set({"turn": 3})
    assert "the prefix is broken" in panel.describe() and len(drawn(panel.figure, "read")) == 4
    panel.set({"snapshots": "all"})
    assert panel.trace.turns[3].hit == 16_384
    panel.set({"turns": 3})
    assert len(panel.trace.turns) == 3 and panel.values["turn"] == 2 and panel.trace.at == 3
    panel.set_state({"dark": True})
    assert panel.picture["layout"]["font"]["color"] == DARK.ink


def test_another_config_has_other_bytes_and_times_and_the_same_hits():
    config = K3Config.kimi_linear_48b()
    story = serving_panel(config=config).trace
    assert [t.hit for t in story.turns] == [t.hit for t in STORY.turns] and story.bill() == STORY.bill()
    size, last = cache_bytes(config, 1), story.turns[-1]
    assert story.kept_bytes() == last.snapshots * size.fixed + last.stored * size.per_token
    work = last.prompt * flops(config, last.prompt).per_token
    assert last.uncached_seconds == pytest.approx(work / SPEED) and last.seconds < STORY.turns[-1].seconds
    assert "in this config." in story.sentence and "in K3." in STORY.sentence


def test_an_impossible_wish_becomes_a_sentence():
    panel = serving_panel()
    for wish in ({"message": 300}, {"turns": 99}, {"broken": "luck"}, {"system": float("inf")}):
        panel.set_state({"values": {**serving_panel().values, **wish}, "asked": panel.asked + 1})
        assert panel.problem and "\n" not in panel.problem and panel.answered == panel.asked


@pytest.mark.parametrize("bad, name", [
    ({"turns": 1}, "turns"), ({"turns": 2.0}, "turns"), ({"system": 100}, "system"), ({"message": 0}, "message"),
    ({"output": 1 << 20}, "output"),
    ({"broken": "luck"}, "broken"), ({"at": 1}, "at"), ({"turns": 3, "at": 4}, "at"), ({"snapshots": "never"}, "snapshots"),
])
def test_a_wrong_argument_is_named_in_one_sentence(bad, name):
    with pytest.raises(ValueError) as error:
        serving_story(**bad)
    assert str(error.value).startswith(name) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^turn must be a whole number from -8 to 7, got 8"):
        serving_figure(story=STORY, turn=8)
