"""The training loop: it learns, and a run that was killed goes on as if it had not been."""

import json
import math

import pytest
import torch

from minimodel import K3ForCausalLM
from minimodel.config import LinearAttnConfig
from minimodel.tensor_files import load_safetensors, save_safetensors
from minimodel.train import Recipe, train
from minimodel.train.__main__ import main
from minimodel.train.loop import Diverged
from tests.minimodel.common import tiny_config, tokens

STEPS = 6


def new_model(seed=0, **changes):
    lin = LinearAttnConfig(kda_layers=(1, 2), full_attn_layers=(3,), num_heads=2, head_dim=8)
    return K3ForCausalLM(tiny_config(num_hidden_layers=3, linear_attn_config=lin, **changes), seed=seed)


def batch(step):
    ids = tokens(2, 12, seed=step)
    return ids, ids


def run(model, folder=None, *, steps=STEPS, batch=batch, **options):
    recipe = Recipe(steps=steps, **{name: options.pop(name) for name in ("lr", "clip", "data", "optimizer") if name in options})
    return train(model, batch, recipe, folder=folder, progress=False, **options)


def killed_at(step, real=batch):
    """A batch that never comes: what a killed process looks like to its folder."""

    def killed(s):
        if s == step:
            raise KeyboardInterrupt
        return real(s)

    return killed


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ---- learning ----


def test_it_learns_a_sequence_by_heart():
    ids = tokens(1, 16)
    model = new_model()
    log = run(model, steps=30, batch=lambda step: (ids, ids))
    assert log[0]["loss"] > 2.5 and log[-1]["loss"] < 0.8
    assert not model.training and torch.equal(model(ids).logits[:, :-1].argmax(-1), ids[:, 1:])
    assert [row["step"] for row in log] == list(range(30)) and all(row["grad_norm"] > 0 for row in log)


def test_the_same_run_twice_is_the_same():
    a, b = new_model(), new_model()
    assert run(a) == run(b) and same(a, b)


def test_schedule():
    recipe = Recipe(steps=200, lr=0.5, warmup=0.1, final_lr=0.1)
    assert [recipe.lr_at(s) for s in (0, 9, 19)] == [0.025, 0.25, 0.5]  # linear warm-up over 20 steps
    assert recipe.lr_at(20) == 0.5 and recipe.lr_at(110) == pytest.approx(0.5 * 0.55)  # half way down the cosine
    assert recipe.lr_at(199) == pytest.approx(0.05, rel=0.01)
    rates = [recipe.lr_at(s) for s in range(20, 200)]
    assert rates == sorted(rates, reverse=True)
    assert Recipe(steps=1, lr=0.5).lr_at(0) == 0.5
    log = run(new_model(), lr=0.02)
    assert [row["lr"] for row in log] == [Recipe(steps=STEPS, lr=0.02).lr_at(s) for s in range(STEPS)]


def test_router_biases_move_with_every_step():
    model = new_model()
    run(model, steps=1)
    assert all(bool(r.e_score_correction_bias.any()) for r in model.routers()) and len(model.routers()) == 2


def test_evaluations_come_when_asked_and_at_the_end():
    seen = []

    def evaluate(model):
        assert not model.training
        seen.append(1)
        return {"score": float(len(seen))}

    log = run(new_model(), steps=5, evaluate=evaluate, evaluate_every=2)
    assert {row["step"]: row["score"] for row in log if "score" in row} == {1: 1.0, 3: 2.0, 4: 3.0}
    assert [row["loss"] for row in log] == [row["loss"] for row in run(new_model(), steps=5)]  # looking changes nothing


def test_the_optimizers_are_those_they_are_called():
    """One step from the same weights: AdamW's first move is lr in every coordinate; whole-matrix Muon is Per-Head Muon with one block."""
    ends = {}
    for name in ("per_head_muon", "muon", "adamw"):
        model = new_model()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        run(model, steps=1, optimizer=name, lr=0.01)
        moved = {n: p for n, p in model.named_parameters() if n.endswith("o_proj.weight") or "q_proj" in n}
        ends[name] = {n: (p.detach() - 0.999 * before[n]) for n, p in moved.items()}
    for n, move in ends["adamw"].items():
        assert move.abs().median() == pytest.approx(0.01, rel=1e-3), n
    for n in ends["muon"]:
        same_move = torch.allclose(ends["muon"][n], ends["per_head_muon"][n], atol=1e-6)
        assert same_move == ("o_proj" in n), n  # only projections with heads are cut
        assert not torch.allclose(ends["muon"][n], ends["adamw"][n], atol=1e-4)


# ---- killed and resumed ----


@pytest.mark.parametrize("killed", [1, 2, 5])
def test_killed_and_resumed_is_bit_identical(tmp_path, killed):
    whole = new_model()
    expected = run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(new_model(), tmp_path, batch=killed_at(killed), checkpoint_every=2)
    assert (tmp_path / "checkpoint.safetensors").exists() == (killed >= 2)
    asked = []
    resumed = new_model(seed=9)  # what it starts from does not matter once there is a checkpoint
    if killed < 2:
        resumed = new_model()
    log = run(resumed, tmp_path, batch=lambda s: asked.append(s) or batch(s), checkpoint_every=2)
    assert log == expected and same(resumed, whole)
    assert asked == list(range(killed // 2 * 2, STEPS))
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.safetensors", "log.jsonl"]


def test_asked_to_stop_it_saves_and_goes_on_later(tmp_path):
    expected, asked = run(new_model()), []
    first = run(new_model(), tmp_path, checkpoint_every=100, stop=lambda: asked.append(1) or len(asked) == 4)
    assert first == expected[:4] and len(asked) == 4
    assert run(new_model(seed=9), tmp_path, stop=lambda: False) == expected
    assert run(new_model(), stop=lambda: True) == expected[:1]  # without a folder too


def test_resumed_in_the_same_model_after_an_interrupted_step(tmp_path):
    """A notebook's interrupt leaves scores in the routers; the run must not count them."""
    whole, model = new_model(), new_model()
    expected = run(whole)
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, batch=killed_at(3), checkpoint_every=1)
    model.train()(tokens(2, 30))
    assert run(model, tmp_path, checkpoint_every=1) == expected and same(model, whole)


def test_a_finished_run_is_not_repeated(tmp_path):
    model = new_model()
    log = run(model, tmp_path)
    again = new_model(seed=3)
    assert run(again, tmp_path, batch=killed_at(0)) == log and same(again, model)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    import minimodel.train.loop as loop

    with pytest.raises(KeyboardInterrupt):
        run(new_model(), tmp_path, batch=killed_at(3), checkpoint_every=2)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()

    def full_disk(path, tensors, meta):
        tensors = dict(tensors)
        tensors["model.lm_head.weight"] = torch.zeros(1).as_subclass(Unwritable)
        save_safetensors(path, tensors, meta)

    class Unwritable(torch.Tensor):
        def numpy(self, *a, **k):
            raise OSError(28, "No space left on device")

        def detach(self):
            raise OSError(28, "No space left on device")

        contiguous = cpu = detach

    monkeypatch.setattr(loop, "save_safetensors", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        run(new_model(), tmp_path, checkpoint_every=2)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.safetensors", "log.jsonl"]


# ---- folders that do not fit ----


@pytest.fixture
def half_way(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(new_model(), tmp_path, batch=killed_at(3), checkpoint_every=2)
    return tmp_path


@pytest.mark.parametrize("changes", [{"steps": 7}, {"lr": 0.5}, {"data": "other notes"}, {"clip": 2.0}, {"optimizer": "muon"}], ids=str)
def test_another_recipe_is_refused(half_way, changes):
    model, before = new_model(), new_model()
    with pytest.raises(ValueError, match="folder: .*checkpoint.safetensors belongs to another recipe, config or data; choose another"):
        run(model, half_way, **changes)
    assert same(model, before)


@pytest.mark.parametrize("changes", [{"vocab_size": 24}, {"rms_norm_eps": 1e-4}, {"full_mixer": "mha"}], ids=str)
def test_another_config_is_refused(half_way, changes):
    with pytest.raises(ValueError, match="belongs to another recipe, config or data"):
        run(new_model(**changes), half_way)


def test_a_twin_that_differs_only_in_what_it_reads_is_refused(tmp_path):
    """Same tensors, same released config: only the mixers' names tell the two apart."""
    run(new_model(full_mixer="mha"), tmp_path, steps=2)
    with pytest.raises(ValueError, match="belongs to another recipe, config or data"):
        run(new_model(full_mixer="sliding_window"), tmp_path, steps=2)


def test_a_damaged_checkpoint_is_refused_and_kept(half_way):
    path = half_way / "checkpoint.safetensors"
    whole = path.read_bytes()
    model, before = new_model(), new_model()
    for end in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="checkpoint.safetensors"):
            run(model, half_way)
        assert path.read_bytes() == whole[:end] and same(model, before)


@pytest.mark.parametrize("damage", ["tensor missing", "tensor cut", "no log", "log too short", "no metadata"])
def test_a_checkpoint_without_a_part_is_refused(half_way, damage):
    path = half_way / "checkpoint.safetensors"
    tensors, meta = load_safetensors(path)
    if damage == "tensor missing":
        del tensors["model.model.norm.weight"]
    elif damage == "tensor cut":
        tensors["model.model.norm.weight"] = tensors["model.model.norm.weight"][:3].clone()
    elif damage == "no log":
        del meta["log"]
    elif damage == "log too short":
        meta["log"] = "[]"
    else:
        meta = {}
    save_safetensors(path, tensors, meta)
    model, before = new_model(), new_model()
    with pytest.raises(ValueError, match="folder: .*checkpoint.safetensors (is damaged|belongs to another recipe)"):
        run(model, half_way)
    assert same(model, before)


# ---- numbers that run away ----


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    model = new_model()
    with torch.no_grad():
        model.lm_head.weight[3, 4] = torch.nan
    with pytest.raises(RuntimeError, match="loss is nan at step 0: lower lr=0.01 or look at the batch"):
        run(model, tmp_path)
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights():
    model, before = new_model(), new_model()
    hook = model.lm_head.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(RuntimeError, match="gradient norm is (inf|nan) at step 0"):
        run(model)
    hook.remove()
    assert same(model, before)


def test_weights_that_ran_away_stop_the_run_with_step_loss_and_rate():
    """The operator refuses what they make of the next batch, before there is a loss."""
    with pytest.raises(Diverged, match=r"^step 1 failed after a loss of [\d.]+ \(.*\): lower lr=1e\+30 or look at the batch$"):
        run(new_model(), steps=3, lr=1e30)

    def evaluate(model):
        raise ValueError("q must be finite")

    with pytest.raises(Diverged, match=r"^the evaluation after step 0 failed after a loss of [\d.]+ \(q must be finite\): lower lr=0.01"):
        run(new_model(), steps=1, evaluate=evaluate)
    with pytest.raises(ValueError, match="must lie in|range|integer"):  # at the first step it is the batch
        run(new_model(), steps=1, batch=lambda step: (batch(0)[0] + 10**6,) * 2)


# ---- wrong input ----


@pytest.mark.bad_input
@pytest.mark.parametrize("settings, words", [
    ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ({"steps": 2.5}, "steps must be an integer of at least 1, got 2.5"),
    ({"steps": 1, "lr": 0.0}, "lr must be positive and finite, got 0.0"),
    ({"steps": 1, "lr": math.nan}, "lr must be positive and finite, got nan"),
    ({"steps": 1, "lr": 1e300}, "lr must be at most 1e35, or a step of the optimizer is too large for float32, got 1e+300"),
    ({"steps": 1, "optimizer": "sgd"}, "optimizer must be one of ('per_head_muon', 'muon', 'adamw'), got 'sgd'"),
    ({"steps": 1, "clip": -1.0}, "clip must be positive and finite, got -1.0"),
    ({"steps": 1, "warmup": 1.5}, "warmup must lie in [0, 1], got 1.5"),
    ({"steps": 1, "final_lr": -0.1}, "final_lr must lie in [0, 1], got -0.1"),
])  # fmt: skip
def test_wrong_recipes(settings, words):
    with pytest.raises(ValueError) as caught:
        Recipe(**settings)
    assert str(caught.value) == words


@pytest.mark.bad_input
def test_wrong_checkpoint_interval():
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        run(new_model(), checkpoint_every=0)


def test_the_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "--steps" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mars", "--out", "x"])
    assert "invalid choice: 'mars'" in capsys.readouterr().err
