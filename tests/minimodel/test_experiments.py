"""The runner: killed, stopped or damaged, an experiment goes on or says in one sentence why not."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimodel.experiments import NAMES, load_experiment, load_results
from minimodel.experiments.__main__ import main
from minimodel.experiments.bodies import hybrid, plain
from minimodel.experiments.definition import Arm, Bars, Finding, Lines, Measured, as_wide_as
from minimodel.experiments.report import VERDICTS, cell, page, section, table
from minimodel.experiments.runner import loss_curve, run, run_unit
from minimodel.experiments.store import STORED, UNIT, Results, load_unit, merged, save_results
from minimodel.formats import format_probability

ROOT = Path(__file__).resolve().parents[2]
quiet = {"progress": False, "say": lambda line: None}


# arms that an experiment's finding speaks of; of the others two are enough here
NAMED = {"toolbox": ("kda", "sliding_window", "mla", "linear_attention", "delta_net"),
         "balancing": ("histogram", "exact", "sign_fast", "loss", "none"),
         "residuals": ("plain", "block_1", "block_2"), "muon": ("per_head_muon-0.004", "muon-0.004", "adamw-0.004"),
         "position": ("kda", "linear_attention"),
         **dict.fromkeys(("palindrome", "mqar", "stack"), ("kda-0.01", "gated_delta_net-0.01", "mamba2-0.01"))}  # fmt: skip


def tiny(name="muon", *, steps=2, arms=None, answers=8):
    """An experiment of the course, for a few steps, with the arms that its finding speaks of."""
    whole = load_experiment(name)
    every = list(whole.arms)
    chosen = NAMED.get(name, (every[0], every[-1]))[:arms]
    return dataclasses.replace(whole, steps=steps, answers=answers, arms={arm: whole.arms[arm] for arm in chosen}, seeds=(0,))


def what_was_measured(unit):
    return {name: x for name, x in dataclasses.asdict(unit).items() if name != "run"}


# ---- definitions ----


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_runs_and_is_reported(name, tmp_path):
    experiment = tiny(name)
    outcome = run(experiment, runs=tmp_path, command="this test", **quiet)
    assert [u.arm for u in outcome.done] == list(experiment.arms) and not outcome.left
    for unit in outcome.done:
        assert unit.steps == 2 and unit.tokens >= 2 * 900 and unit.parameters == experiment.arms[unit.arm].parameters
        drawn = {p.score for p in experiment.shows if isinstance(p, Bars)} | {p.curve for p in experiment.shows if isinstance(p, Lines)}
        assert drawn & unit.scores.keys() and unit.curves["training loss"]["x"] == [1, 2]
        for curve in unit.curves.values():
            assert len(curve["x"]) == len(curve["y"]) > 0
    everywhere = set.union(*({*u.scores, *u.curves} for u in outcome.done))
    optional = {"steps to 90 %"}
    assert drawn - optional <= everywhere, drawn - everywhere
    results = merged(experiment, None, list(outcome.done))
    assert "this test" not in section(experiment, results) and "| arm |" in section(experiment, results)


@pytest.mark.parametrize("name", NAMES)
def test_arms_differ_and_are_of_one_size(name):
    experiment = load_experiment(name)
    runs = {experiment.recipe(arm, seed).data for arm in experiment.arms for seed in experiment.seeds}
    assert len(runs) == len(experiment.arms) * len(experiment.seeds)
    assert len({arm.label for arm in experiment.arms.values()}) == len(experiment.arms)
    assert all(re.fullmatch(r"[\w.-]+", arm) for arm in experiment.arms)  # names of folders, on Windows too
    sizes = [arm.parameters for arm in experiment.arms.values()]
    assert max(sizes) / min(sizes) < 1.05


@pytest.mark.parametrize("name", NAMES)
def test_all_arms_see_the_same_batches(name):
    experiment = load_experiment(name)
    arms = list(experiment.arms)
    first = experiment.batch(arms[0], 0, 3)
    for arm in arms[1:]:
        again = experiment.batch(arm, 0, 3)
        assert all((a == b).all() for a, b in zip(first, again, strict=True))
    other = experiment.batch(arms[0], 1, 3)
    assert first[0].shape != other[0].shape or (first[0] != other[0]).any()


def test_a_size_is_matched_by_the_feed_forward():
    target = Arm("", hybrid(3)).parameters
    assert abs(Arm("", as_wide_as(plain("mha"), target)).parameters / target - 1) < 0.005
    with pytest.raises(ValueError, match="parameters=1000 cannot be reached by intermediate_size"):
        as_wide_as(plain("mha"), 1000)


# ---- killed, stopped, resumed ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A unit that nothing disturbed."""
    experiment = tiny(steps=4, arms=2)
    return experiment, run(experiment, runs=tmp_path_factory.mktemp("whole"), **quiet)


def test_a_unit_that_was_interrupted_gives_the_same_result(whole, tmp_path, monkeypatch):
    import minimodel.experiments.runner as runner

    monkeypatch.setattr(runner, "CHECKPOINT_EVERY", 2)
    experiment, expected = whole
    arm = expected.done[0].arm

    def broken(a, seed, step):
        if step == 3:
            raise KeyboardInterrupt
        return experiment.batch(a, seed, step)

    with pytest.raises(KeyboardInterrupt):
        run_unit(dataclasses.replace(experiment, batch=broken), arm, 0, tmp_path, progress=False)
    assert (tmp_path / "checkpoint.safetensors").exists() and not (tmp_path / UNIT).exists()
    asked = []
    counting = dataclasses.replace(experiment, batch=lambda a, seed, step: asked.append(step) or experiment.batch(a, seed, step))
    resumed = run_unit(counting, arm, 0, tmp_path, progress=False)
    assert what_was_measured(resumed) == what_was_measured(expected.done[0]) and [s for s in asked if s < 100] [:2] == [2, 3]


def test_a_budget_stops_between_steps_and_the_same_call_goes_on(whole, tmp_path, monkeypatch):
    import minimodel.experiments.runner as runner

    experiment, expected = whole
    now = [0.0]
    monkeypatch.setattr(runner.time, "monotonic", lambda: now[0])

    def slow(arm, seed, step):
        now[0] += 10 if step < 100 else 0
        return experiment.batch(arm, seed, step)

    timed = dataclasses.replace(experiment, batch=slow)
    first = run(timed, runs=tmp_path, minutes=0.5, **quiet)  # three steps of ten seconds
    arms = list(experiment.arms)
    assert not first.done and first.left == ((arms[0], 0, 3), (arms[1], 0, 0))
    second = run(timed, runs=tmp_path, minutes=60, **quiet)
    assert not second.left
    assert [what_was_measured(u) for u in second.done] == [what_was_measured(u) for u in expected.done]
    assert second.done[0].run["seconds"] >= 40

    def never(*a):
        raise AssertionError("what was done is done again")

    assert run(dataclasses.replace(timed, measure=never, batch=never), runs=tmp_path, **quiet).done == second.done


@pytest.mark.slow
def test_a_process_that_is_really_killed(tmp_path):
    """SIGKILL while it trains, then the same command; against a run that nobody disturbed."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "import torch; torch.set_num_threads(1)\n"
        "import minimodel.experiments.runner as runner; runner.CHECKPOINT_EVERY = 2\n"
        "from tests.minimodel.test_experiments import tiny\n"
        "runner.run(tiny(steps=12, arms=1), runs=Path(sys.argv[2]), progress=False)\n"
    )
    where = Path("muon") / next(iter(load_experiment("muon").arms)) / "seed-0"

    def start(folder):
        return subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(folder)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    process = start(tmp_path / "killed")
    saved = tmp_path / "killed" / where / "checkpoint.safetensors"
    while process.poll() is None and not saved.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.exists() and not (saved.parent / UNIT).exists()
    assert start(tmp_path / "killed").wait() == 0 and start(tmp_path / "whole").wait() == 0
    results = [load_unit(tmp_path / name / where / UNIT) for name in ("killed", "whole")]
    assert what_was_measured(results[0]) == what_was_measured(results[1])


# ---- damage ----


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"arm": 1}', "\xff"], ids=repr)
def test_a_damaged_result_is_one_sentence(whole, tmp_path, text):
    experiment, expected = whole
    (tmp_path / UNIT).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^result file .*result.json is damaged \(.*\): delete it to measure again$"):
        run_unit(experiment, expected.done[0].arm, 0, tmp_path, progress=False)


def test_a_damaged_checkpoint_or_clock_is_one_sentence(whole, tmp_path):
    experiment, expected = whole
    arm = expected.done[0].arm
    (tmp_path / "clock.json").write_text("{}")
    with pytest.raises(ValueError, match="clock.json is damaged: delete it"):
        run_unit(experiment, arm, 0, tmp_path, progress=False)
    (tmp_path / "clock.json").unlink()
    (tmp_path / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="checkpoint.safetensors is truncated or corrupted"):
        run_unit(experiment, arm, 0, tmp_path, progress=False)


def test_a_folder_of_another_definition_is_refused(whole, tmp_path):
    experiment, _ = whole
    arm = next(iter(experiment.arms))
    run_unit(experiment, arm, 0, tmp_path, progress=False)
    for other in (dataclasses.replace(experiment, version=2), dataclasses.replace(experiment, steps=5)):
        with pytest.raises(ValueError, match="belongs to another definition of muon"):
            run_unit(other, arm, 0, tmp_path, progress=False)
    with pytest.raises(ValueError, match="belongs to another definition of muon"):
        run_unit(experiment, arm, 1, tmp_path, progress=False)


def test_a_number_that_is_not_finite_is_not_stored(whole, tmp_path):
    experiment, _ = whole
    bad = dataclasses.replace(experiment, measure=lambda *a: Measured({"loss": float("nan")}, {}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_unit(bad, next(iter(experiment.arms)), 0, tmp_path, progress=False)
    assert not (tmp_path / UNIT).exists()


# ---- results, page, command ----


def test_new_runs_take_the_place_of_old_ones(whole, tmp_path):
    experiment, outcome = whole
    first, second = outcome.done
    better = dataclasses.replace(first, scores={"loss": 0.5})
    results = merged(experiment, Results("muon", (second, first)), [better])
    assert results.units == (better, second)  # in the order of the arms
    assert merged(experiment, Results("muon", (dataclasses.replace(first, fingerprint="old"),)), []).units == ()
    path = save_results(results, tmp_path)
    assert load_results("muon", tmp_path) == results and len(path.read_text().splitlines()) == 4
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="muon.json is damaged"):
        load_results("muon", tmp_path)
    with pytest.raises(ValueError, match="no results of the experiment 'muon' are stored at"):
        load_results("muon", tmp_path / "nowhere")


def test_a_spread_is_shown_only_where_there_is_one():
    assert cell(Bars("x", "", percent=True), [0.25]) == format_probability(0.25)
    assert cell(Bars("x", ""), [1.0, 3.0]) == "2.00 (1.00 to 3.00)"
    assert cell(Bars("x", ""), [123456.0]) == "123,456" and cell(Bars("x", ""), []) == "-"


def test_a_training_curve_is_averaged_over_stretches():
    log = [{"step": i, "loss": float(i)} for i in range(10)]
    assert loss_curve(log, points=3) == {"x": [4, 8, 10], "y": [1.5, 5.5, 8.5]}


def test_what_does_not_agree_is_said(whole):
    experiment, outcome = whole
    results = merged(experiment, None, list(outcome.done))
    for agrees, words in VERDICTS.items():
        said = section(dataclasses.replace(experiment, finding=lambda scores, a=agrees: Finding(a, "So.")), results)
        assert f"Ours: So. At this size: {words}." in said
    partial = Results(results.name, results.units[:1])
    assert "Not every arm was run yet." in section(experiment, partial) and "Not run yet: " in section(experiment, partial)
    assert "Not run yet" in section(experiment, None)
    assert experiment.arms[results.units[0].arm].label in table(experiment, results, title="here")


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/evidence.md").read_text(encoding="utf-8") == page(), "run: python -m minimodel.experiments report"


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.stem)
def test_stored_results_are_of_todays_definitions(path):
    """A result of another definition would be drawn beside arms it was not compared with."""
    experiment, results = load_experiment(path.stem), load_results(path.stem)
    assert merged(experiment, results, []) == results and results.units
    for unit in results.units:
        assert unit.steps == experiment.steps and unit.parameters == experiment.arms[unit.arm].parameters
        assert unit.run["command"] and unit.run["cpu_seconds"] > 0 and unit.run["processor"]


def test_the_command(tmp_path, capsys, monkeypatch):
    import minimodel.experiments.__main__ as command

    monkeypatch.setattr(command, "load_experiment", lambda name: tiny(name, arms=2))
    monkeypatch.setattr(command, "STORED", tmp_path / "stored")
    main(["list"])
    assert "2 arms, 0 stored runs" in capsys.readouterr().out
    main(["run", "muon", "--runs", str(tmp_path / "runs"), "--seeds", "0", "--threads", "1"])
    assert "run here" in capsys.readouterr().out
    monkeypatch.setattr(command, "NAMES", ("muon",))
    main(["report", "--collect", str(tmp_path / "runs"), "--page", str(tmp_path / "page.md")])
    stored = json.loads((tmp_path / "stored/muon.json").read_text())
    assert len(stored) == 2 and stored[0]["run"]["command"].startswith("python -m minimodel.experiments run muon")
    assert (tmp_path / "page.md").read_text().startswith("# Evidence")
    main(["run", "muon", "--runs", str(tmp_path / "other"), "--budget", "0.0001"])
    said = capsys.readouterr().out
    assert "stored with the course" in said and "left: " in said
    monkeypatch.setattr(command, "load_experiment", lambda name: dataclasses.replace(tiny(name, arms=2), version=99))
    before = (tmp_path / "stored/muon.json").read_bytes()
    with pytest.raises(SystemExit, match="--collect: .*typo is no folder"):
        main(["report", "--collect", str(tmp_path / "typo"), "--page", str(tmp_path / "page.md")])
    capsys.readouterr()
    main(["report", "--collect", str(tmp_path / "runs"), "--page", str(tmp_path / "page.md")])
    said = capsys.readouterr().out
    for arm in tiny(arms=2).arms:  # runs of an older definition: named, not shown, and still there
        assert f"muon: not taken: {arm}, seed 0, of another definition" in said and f"muon: stored, but not shown: {arm}, seed 0" in said
    assert (tmp_path / "stored/muon.json").read_bytes() == before
    first, second = json.loads(before)
    (tmp_path / "stored/muon.json").write_text(json.dumps([first, {**second, "fingerprint": "old"}]))
    monkeypatch.setattr(command, "load_experiment", lambda name: tiny(name, arms=2))
    (tmp_path / "none").mkdir()
    main(["report", "--collect", str(tmp_path / "none"), "--page", str(tmp_path / "page.md")])
    assert f"muon: dropped: {second['arm']}, seed 0, of another definition (old)" in capsys.readouterr().out
    assert json.loads((tmp_path / "stored/muon.json").read_text()) == [first]


@pytest.mark.parametrize("field, value", [
    ("arm", ""), ("seed", "0"), ("seed", -1), ("seed", True), ("steps", "9"), ("steps", 1.5), ("lr", 0), ("lr", None), ("optimizer", 1),
    ("parameters", 0), ("tokens", None), ("fingerprint", None), ("scores", {}), ("scores", []), ("scores", {"loss": float("nan")}),
    ("scores", {"loss": "low"}), ("curves", None), ("curves", {"loss": None}), ("curves", {"loss": {"x": [1.0], "y": [1.0, 2.0]}}),
    ("curves", {"loss": {"x": [1.0], "y": [float("inf")]}}), ("run", None), ("run", {}), ("run", {"command": 1}),
])  # fmt: skip
def test_a_stored_result_of_the_wrong_type_is_one_sentence(field, value, tmp_path):
    entries = json.loads((STORED / "muon.json").read_text())[:2]
    entries[1][field] = value
    (tmp_path / "muon.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"^result file .*muon.json is damaged \(entry 1: {field} must be [^\n]*\): delete it"):
        load_results("muon", tmp_path)


def test_a_stored_result_that_is_there_twice(tmp_path):
    entries = json.loads((STORED / "muon.json").read_text())
    (tmp_path / "muon.json").write_text(json.dumps([*entries, entries[0]]))
    with pytest.raises(ValueError, match=rf"muon.json is damaged \(entry {len(entries)}: {entries[0]['arm']}, seed 0 is there twice\)"):
        load_results("muon", tmp_path)


def test_a_run_of_another_definition_is_not_on_the_page(monkeypatch, tmp_path):
    import minimodel.experiments.report as report

    entries = json.loads((STORED / "muon.json").read_text())
    strange = [{**entries[0], "fingerprint": "foreign"}, {**entries[1], "arm": "sgd"}]
    for folder, what in (("whole", entries), ("strange", strange)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "muon.json").write_text(json.dumps(what))
    monkeypatch.setattr(report, "NAMES", ("muon",))
    for folder, missing in (("whole", False), ("strange", True)):
        monkeypatch.setattr(report, "STORED", tmp_path / folder)
        monkeypatch.setattr(report, "load_results", lambda name, folder=folder: load_results(name, tmp_path / folder))
        assert ("Not run yet" in page()) == missing


@pytest.mark.parametrize("arguments, words", [
    (["run", "muon", "--budget", "0"], "minutes must be positive, got 0.0"),
    (["run", "muon", "--seeds", "-1"], "seeds must be whole numbers from 0"),
    (["run", "muon", "--arms", "sgd"], "arms: muon has per_head_muon-0.004, .* got 'sgd'"),
    (["run", "muon", "--seeds", "99999999999999999999999"], "seeds must be whole numbers from 0 to 4294967295"),
    (["run", "muon", "--threads", "0"], "--threads must lie in 1..1024, got 0"),
    (["run", "muon", "--threads", "999999999999"], "--threads must lie in 1..1024, got 999999999999"),
])  # fmt: skip
def test_wrong_commands_end_with_one_sentence(arguments, words, tmp_path):
    if arguments[2] == "--seeds":
        arguments = [*arguments[:2], f"--seeds={arguments[3]}"]
    with pytest.raises(SystemExit, match=words):
        main([*arguments, "--runs", str(tmp_path)])


@pytest.mark.bad_input
def test_what_is_no_list_of_seeds_and_no_folder(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["run", "muon", "--seeds", "x"])
    assert "argument --seeds: takes whole numbers with commas between them, as in 0,1, got 'x'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="runs: .*file can't be written as a folder"):
        main(["run", "muon", "--runs", str(tmp_path / "file")])


@pytest.mark.bad_input
def test_an_unknown_experiment():
    with pytest.raises(ValueError, match="name must be one of toolbox, .* got 'mars'"):
        load_experiment("mars")
