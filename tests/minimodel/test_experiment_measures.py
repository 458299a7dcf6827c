"""The experiments' measurements, each against what it has to be on a case that can be worked out another way."""

import math

import pytest
import torch

from minimodel import K3ForCausalLM
from minimodel.experiments import balancing, decays, four_bits, measures, muon, position, probes, residuals
from minimodel.experiments.bodies import hybrid, mixture, plain
from minimodel.routing import Router, balance_loss, sign_bias
from minimodel.tasks import meeting
from minimodel.train import Recipe, train

SMALL = {"layers": 2, "heads": 2, "channels": 8}


class Knows(torch.nn.Module):
    """A model that says what a function of the words so far says."""

    def __init__(self, say):
        super().__init__()
        self.say = say

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, len(meeting.VOCABULARY))
        for row in range(len(ids)):
            for t in range(ids.shape[1]):
                logits[row, t, self.say(ids[row, : t + 1].tolist())] = 1.0
        return type("Output", (), {"logits": logits})


DAYS = [meeting.encode(day)[0] for day in meeting.SLOTS["day"]]


def first_day(ids):
    return next((i for i in ids if i in DAYS), 0)


# ---- notes ----


def test_practice_notes_fit_and_ask():
    for step in range(6):
        ids, labels = probes.practice(0, step, projects=2)
        assert ids.shape == labels.shape == ((16, 64) if step % 2 == 0 else (4, 256))
        blank = ids == meeting.encode(meeting.BLANK)[0]
        assert bool((labels[blank] != -100).all()) and int(blank.sum()) > 10
        again = probes.practice(0, step, projects=2)
        assert torch.equal(ids, again[0]) and not torch.equal(ids, probes.practice(1, step, projects=2)[0])
    for seed in range(300):  # no draw is longer than its note may be
        probes.practice(seed, 0)


def test_a_stream_has_no_gaps():
    ids, labels = probes.stream(0, 3)
    assert ids.shape == (8, 128) and bool((ids != 0).all()) and bool((labels != -100).all())
    blank = ids == meeting.encode(meeting.BLANK)[0]
    assert torch.equal(ids[~blank], labels[~blank]) and bool((labels[blank] != ids[blank]).all()) and bool(blank.any())


@pytest.mark.parametrize("distance", [8, 64, 192])
def test_a_fact_lies_about_as_far_back_as_said(distance):
    for note in probes.told_at(0, 20, distance=distance, projects=2):
        blank = len(note.ids) - 1
        assert [i for i, label in enumerate(note.labels) if label != -100] == [blank]
        assert note.ids[blank] == meeting.encode(meeting.BLANK)[0]
        assert distance <= blank <= distance + meeting.SENTENCE + meeting.ASKED
        first = meeting.decode(note.ids[: note.ids.index(meeting.encode(".")[0])])
        assert meeting.VOCABULARY[note.labels[blank]] in first  # the fact asked for is the first sentence
        assert list(note.facts).count(None) == 0


def test_replaced_days_are_told_apart():
    """A reader who keeps the first day is right without updates and stale with them."""
    reader = Knows(first_day)
    fresh, stale = [], []
    for updates in (0, 3):
        notes, old = probes.replaced(0, 12, updates=updates)
        said = probes.answers(reader, notes)
        fresh.append(probes.right(said))
        stale.append(sum(a in days for (a, _), days in zip(said, old, strict=True)))
        assert all(right not in days for (_, right), days in zip(said, old, strict=True))
        assert all(len(days) <= updates for days in old)
    assert fresh[0] == 1.0 and stale[0] == 0 and fresh[1] + stale[1] / 12 == pytest.approx(1.0)


# ---- measures ----


def test_held_out_loss_weighs_every_label_alike():
    model = K3ForCausalLM(plain("mha", **SMALL)).eval()
    parts = [probes.practice(measures.HELD_OUT, step) for step in range(2)]
    total = count = 0
    for ids, labels in parts:
        logits = model(ids).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
        total, count = total + float(nll.sum()), count + int((labels[:, 1:] != -100).sum())
    assert measures.held_out_loss(model, probes.practice, 2) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("window", [3, 5])
def test_reach_is_layers_times_window_less_one(window):
    model = K3ForCausalLM(plain("sliding_window", layers=3, heads=2, channels=8, sliding_window=window, initializer_range=0.3))
    assert measures.reach(model, 40) == (window - 1, 3 * (window - 1))
    assert measures.reach(K3ForCausalLM(plain("mha", **SMALL)), 40) == (39, 39)


def test_cache_growth_is_that_of_the_tensors():
    grown = measures.cache_growth(K3ForCausalLM(hybrid(3)).eval(), (8, 16, 32))
    a, b, c = grown["y"]
    assert c - b == 2 * (b - a) == 16 * 48 * 4  # one MLA layer: 32 + 16 numbers of four bytes a token


def test_recall_of_one_who_always_says_the_same():
    notes = meeting.held_out_notes(1, 8, projects=1, length=64, final_questions=4)
    share = sum(label == DAYS[0] for note in notes for label in note.labels if label != -100)
    asked = sum(label != -100 for note in notes for label in note.labels)
    assert measures.recall(Knows(lambda ids: DAYS[0]), projects=1, length=64, answers=32) == pytest.approx(share / asked, abs=0.2)


# ---- decays, position, residuals ----


def test_half_lives_are_those_of_the_gates():
    """With the gate's projection at zero alpha depends on the bias alone, so every channel's half-life is known."""
    model = K3ForCausalLM(plain("kda", **SMALL)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.f_b_proj.weight.zero_()
            layer.self_attn.dt_bias.fill_(-2.0)
    channels, kinds = decays.half_lives(model, meeting.held_out_notes(0, 2, projects=1, length=64, final_questions=2))
    expected = math.log(2) / (5 / (1 + math.exp(2.0)))
    assert channels == pytest.approx([expected] * 32, rel=1e-4) and kinds == pytest.approx({"value": expected, "chat": expected}, rel=1e-4)


def test_words_are_values_or_chat_or_neither():
    assert decays.kind_of("Tuesday") == "value" and decays.kind_of("printer") == "chat"
    assert decays.kind_of("The") is None and decays.kind_of("meeting") is None


def test_a_probe_reads_what_is_there_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 300, dtype=torch.float64, generator=generator)
    weight = torch.zeros(300, dtype=torch.float64)
    weight[:3] = torch.tensor([2.0, -1.0, 0.5])
    x[:, 3:] *= 0.01
    probe = position.Probe.fit(x[:60], x[:60] @ weight + 7)
    assert position.explained(x[60:] @ weight + 7, probe(x[60:])) > 0.99
    noise = torch.randn(80, dtype=torch.float64, generator=generator)
    assert position.explained(noise[60:], position.Probe.fit(x[:60], noise[:60])(x[60:])) < 0.3
    z, y = x[:60] - x[:60].mean(0), x[:60] @ weight
    ridge = position.RIDGE * z.square().sum(1).mean() * torch.eye(300, dtype=torch.float64)
    primal = torch.linalg.solve(z.T @ z + ridge, z.T @ (y - y.mean()))
    assert torch.allclose(probe.weight, primal, atol=1e-8)  # the dual form is the ridge regression


def test_probe_notes_hold_their_fact_where_they_say():
    ids, distances = position.probe_notes(0, 50)
    acme = meeting.encode("Acme")[0]
    for row, distance in zip(ids.tolist(), distances.tolist(), strict=True):
        assert len(row) - 1 - max(i for i, word in enumerate(row) if word == acme) == distance


def test_depth_is_read_evenly_before_training():
    """Pseudo-queries start at zero: every reader averages its sources."""
    model = K3ForCausalLM(hybrid(3, layers=4).replace(attn_res_block_size=1)).eval()
    ids, _ = probes.practice(0, 0)
    reads = residuals.depth_reads(model, ids)
    counts = [2, 2, 3, 3, 4, 4, 5, 5]  # sources of each reader, the output's last; the first layer's attention has one and doesn't read
    assert reads["weight of the embedding"] == pytest.approx(sum(1 / n for n in counts) / 8, rel=1e-4)
    assert len(residuals.output_sizes(model, ids)["y"]) == 8


# ---- balancing ----


def test_watched_routers_do_what_their_rule_says():
    config = mixture(layers=2, experts=4)
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for rule in balancing.RULES:
        router, plainly = balancing.WatchedRouter(config, rule).train(), Router(config).train()
        with torch.no_grad():
            router.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        plainly.load_state_dict(router.state_dict())
        plainly.estimator = "exact" if rule == "exact" else "histogram"
        for r in (router, plainly):
            weights, indices = r(x)
            r.update_bias()
        loads = torch.bincount(indices.flatten(), minlength=4)
        assert torch.equal(router.loads, loads)
        if rule in ("exact", "histogram"):
            wanted = plainly.e_score_correction_bias
        else:
            rate = balancing.RATES.get(rule, 0.0)
            wanted = sign_bias(loads, torch.zeros(4), rate) if rate else torch.zeros(4)
        assert torch.equal(router.e_score_correction_bias, wanted)
        if rule == "loss":
            assert float(router.penalty) == pytest.approx(float(balance_loss(torch.sigmoid(x @ router.weight.T), indices)))


def test_the_auxiliary_loss_is_in_training_only():
    config = mixture(layers=2, experts=4)
    ids, labels = probes.stream(0, 0, rows=2, length=32)
    models = {rule: balancing.build(config, seed=0, rule=rule) for rule in ("loss", "none")}
    for model in models.values():
        model.train()
    losses = {rule: float(model(ids, labels=labels).loss) for rule, model in models.items()}
    penalty = sum(float(router.penalty) for router in models["loss"].routers())
    assert losses["loss"] - losses["none"] == pytest.approx(balancing.COEFFICIENT * penalty, rel=1e-3)
    assert float(models["loss"].eval()(ids, labels=labels).loss) == pytest.approx(float(models["none"].eval()(ids, labels=labels).loss))


def test_with_nothing_the_bias_stays_and_with_the_rule_loads_even_out():
    ends = {}
    for rule in ("none", "exact"):
        model = balancing.build(mixture(layers=2, experts=8), seed=0, rule=rule)
        with torch.no_grad():
            for router in model.routers():
                router.weight.mul_(20)
        log = train(model, lambda step: probes.stream(0, step, rows=4), Recipe(steps=6, lr=1e-4), progress=False,
                    evaluate=lambda model: balancing.evaluate(model, "", 0), evaluate_every=1)  # fmt: skip
        ends[rule] = [row["max over mean"] for row in log]
        assert all(bool(r.e_score_correction_bias.any()) == (rule == "exact") for r in model.routers())
    assert ends["none"][0] == ends["exact"][0] and ends["exact"][-1] - 1 < 0.6 * (ends["none"][-1] - 1)


# ---- four bits ----


def test_what_is_known_by_heart_is_counted_over_all_facts():
    model = K3ForCausalLM(four_bits.BODY).eval()
    loss, share = four_bits.known(model)
    right, total = 0, 0.0
    for first in range(0, four_bits.NAMES, 16):
        a = torch.arange(first, first + 16).repeat_interleave(four_bits.NAMES)
        ids, labels = four_bits.facts(a, torch.arange(four_bits.NAMES).repeat(16))
        out = model(ids)
        right += int((out.logits[:, 1].argmax(-1) == labels[:, 2]).sum())
        total += float(torch.nn.functional.cross_entropy(out.logits[:, 1], labels[:, 2], reduction="sum"))
    assert share == pytest.approx(right / four_bits.NAMES**2) and loss == pytest.approx(total / four_bits.NAMES**2, rel=1e-4)


def test_the_grid_comes_half_way():
    model, seen = K3ForCausalLM(four_bits.BODY), []
    for step in range(4):
        four_bits.in_the_grid(model, step, 4)
        seen.append({m.rounding for m in model.modules() if hasattr(m, "rounding")})
    assert seen == [{False}, {False}, {True}, {True}]


# ---- muon ----


def test_separated_heads_move_alike():
    """Per-Head Muon gives every head about the same update. AdamW's first step has one size for every coordinate."""
    per_head, whole, adamw = (muon.weak_over_strong(name, 0) for name in muon.OPTIMIZERS)
    assert per_head == pytest.approx(1.0, abs=0.15) and adamw == pytest.approx(1.0, abs=0.1) and whole < 0.8 * per_head
