"""The benchmarks' own logic, with made-up samples: no time is measured here, and nothing is installed."""
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import gpu, inputs, peers, process, reference, report, sections, store, targets, transformer, worker
from benchmarks import profile as profiling
from benchmarks.__main__ import PAGE, RESULTS, main, measure
from benchmarks.ours import Ours
from benchmarks.samples import ContestantFailed, Samples, summarize, take_turns
from benchmarks.training import Training
from minimodel import K3Config, K3ForCausalLM, PerHeadMuon, parameter_budget
from minimodel.accounting import flops

SMALL = inputs.Shape(40, B=2, H=2, K=16)


# ---- inputs and the cost that everybody is counted with ----
def test_the_cost_of_a_token_is_the_one_of_the_accounting():
    config = K3Config.mini()
    lin = config.linear_attn_config
    layers = sum(config.is_kda_layer(i) for i in range(config.num_hidden_layers))
    counted = flops(config, 512, chunk=inputs.CHUNK).by_component["kda_operator"]
    assert layers * lin.num_heads * inputs.delta_rule_flops(lin.head_dim) == counted
    assert inputs.delta_rule_flops(128) == 126_976
    assert inputs.Shape(8192).flops() == 8192 * 4 * 126_976


def test_inputs_are_seeded_activated_and_span_the_gate():
    x, again = inputs.operator_inputs(SMALL), inputs.operator_inputs(SMALL)
    assert all(np.array_equal(x[name], again[name]) for name in x)
    assert not np.array_equal(x["q"], inputs.operator_inputs(SMALL, seed=1)["q"])
    assert all(a.dtype == np.float32 for a in x.values())
    assert x["g"].shape == (2, 40, 2, 16) and x["S"].shape == (2, 2, 16, 16)
    np.testing.assert_allclose(np.linalg.norm(x["k"], axis=-1), 1, rtol=1e-5)
    assert -5 < x["g"].min() < -4.5 and -0.05 < x["g"].max() < 0
    assert inputs.operator_inputs(SMALL, one_decay_a_head=True)["g"].shape == (2, 40, 2)


# ---- taking turns ----
def scripted(log, name, seconds):
    def call():
        log.append(name)
        return seconds

    return call


def test_contestants_take_turns_with_a_probe_between():
    log = []
    calls = {"a": scripted(log, "a", 2.0), "b": scripted(log, "b", 3.0)}
    turns = take_turns(calls, scripted(log, "probe", 1.0), least=1, most=2, budget=100.0)
    assert log == ["probe", "a", "probe", "b", "probe", "a", "probe", "b", "probe"]
    assert turns.samples["a"].seconds == [2.0, 2.0] and turns.samples["b"].probes == [(1.0, 1.0), (1.0, 1.0)]


def test_a_slow_contestant_stops_at_its_budget_and_the_others_go_on():
    now = [0.0]

    def lasting(seconds):
        def call():
            now[0] += seconds
            return seconds

        return call

    calls = {"slow": lasting(30.0), "middle": lasting(4.0), "fast": lasting(0.1)}
    turns = take_turns(calls, lambda: 0.01, least=3, most=12, budget=6.0, clock=lambda: now[0])
    assert {name: len(s.seconds) for name, s in turns.samples.items()} == {"slow": 1, "middle": 3, "fast": 12}


def test_a_failing_contestant_is_asked_no_more_and_keeps_its_reason():
    calls = {"good": lambda: 1.0, "bad": lambda: (_ for _ in ()).throw(ContestantFailed("no memory"))}
    turns = take_turns(calls, lambda: 0.1, least=2, most=2, budget=100.0)
    assert turns.failures == {"bad": "no memory"}
    assert turns.samples["bad"].seconds == [] and len(turns.samples["good"].seconds) == 2


def test_the_median_is_of_clean_samples():
    taken = Samples([1.0, 5.0, 1.2, 0.9], [(0.10, 0.11), (0.10, 0.50), (0.11, 0.10), (0.30, 0.10)])
    s = summarize(taken, fastest_probe=0.10)
    assert (s.best, s.clean, s.taken) == (0.9, 2, 4)
    assert s.median == pytest.approx(1.1)


def test_a_busy_machine_is_said_to_be_busy():
    s = summarize(Samples([3.0, 2.0, 4.0], [(0.5, 0.5)] * 3), fastest_probe=0.1)
    assert (s.clean, s.median) == (0, 3.0)
    assert "busy" in report._times({"best_ms": 2.0, "median_ms": 3.0, "clean": 0})[1]


@pytest.mark.bad_input
def test_wrong_settings_of_the_sampling_are_named():
    with pytest.raises(ValueError, match="least=3, most=2"):
        take_turns({}, lambda: 1.0, least=3, most=2)
    with pytest.raises(ValueError, match="at least one call"):
        summarize(Samples(), 0.1)


# ---- the judge ----
@pytest.mark.parametrize("one_decay", [False, True])
def test_the_judge_is_the_recurrence(one_decay):
    x = {n: a.astype(np.float64) for n, a in inputs.operator_inputs(SMALL, one_decay_a_head=one_decay).items()}
    judge = reference.reference("forward", SMALL, one_decay_a_head=one_decay)
    S = np.zeros((2, 2, 16, 16))
    for t in range(SMALL.T):
        g = x["g"][:, t, :, None] if one_decay else x["g"][:, t]
        S = np.exp(g)[..., None] * S
        error = x["v"][:, t] - np.einsum("bhkv,bhk->bhv", S, x["k"][:, t])
        S = S + np.einsum("bh,bhk,bhv->bhkv", x["beta"][:, t], x["k"][:, t], error)
        o = np.einsum("bhkv,bhk->bhv", S, x["q"][:, t]) / 4
        np.testing.assert_allclose(judge["o"][:, t], o, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(judge["S"], S, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["", "unchecked"])
@pytest.mark.parametrize("call", ["forward", "forward_backward", "decode"])
def test_ours_passes_the_judge(call, variant, tmp_path):
    ours = Ours(1, variant)
    shape = inputs.Shape(1, B=2, H=2, K=16) if call == "decode" else SMALL
    sizes = {"B": shape.B, "H": shape.H, "K": shape.K, "seed": 0}
    ours.prepare_decode(**sizes) if call == "decode" else ours.prepare(T=shape.T, **sizes)
    ours.save(call, str(tmp_path / "results.npz"))
    error = reference.largest_error(reference.load_results(tmp_path / "results.npz"), reference.reference(call, shape))
    assert error < 1e-5
    assert reference.complaint(error, reference.TOLERANCE[call]) is None


def test_wrong_results_do_not_count():
    judge = reference.reference("forward", SMALL)
    off = {"o": judge["o"] * 1.01, "S": judge["S"]}
    assert reference.largest_error(off, judge) == pytest.approx(0.01)
    assert reference.complaint(0.01, 1e-4) == "wrong: relative error 1.0e-02"
    error = reference.largest_error({"o": judge["o"], "S": np.full_like(judge["S"], np.nan)}, judge)
    assert math.isnan(error) and reference.complaint(error, 1e-4) == "wrong: not finite"
    error = reference.largest_error({"o": judge["o"], "S": np.full_like(judge["S"], np.inf)}, judge)
    assert reference.complaint(error, 1e-4) == "wrong: not finite"
    with pytest.raises(ValueError, match="must be"):
        reference.largest_error({"o": judge["o"]}, judge)


def test_ours_reads_a_context_and_decodes_after_it():
    ours = Ours(1, "")
    ours.read_context(tokens=[24, 40], segment=16, H=2, K=16, seed=0)
    assert set(ours.kept) == {24, 40} and not torch.equal(ours.kept[24], ours.kept[40])
    kept = ours.kept[24].clone()
    assert ours.decode_after(24, steps=2) > 0
    assert torch.equal(ours.kept[24], kept)  # decoding in place must not touch what was kept


# ---- processes ----
def fake_python(folder, body):
    """An executable that stands for Python: whatever it is asked to run, it runs ``body``."""
    script = folder / "body.py"
    script.write_text("import json, sys, time\n" + body)
    launcher = folder / "python"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    launcher.chmod(0o755)
    return launcher


ECHO = "for line in sys.stdin:\n    print(json.dumps({'ok': json.loads(line)}), flush=True)\n"


def test_a_process_answers(tmp_path):
    with process.Process("x", python=fake_python(tmp_path, ECHO), threads=1) as p:
        assert p.ask("time", call="forward") == {"do": "time", "call": "forward"}
        assert p.ask("describe") == {"do": "describe"}


@pytest.mark.parametrize("body, reason", [
    ("for line in sys.stdin: print(json.dumps({'failed': 'ImportError: no such library'}), flush=True)", "ImportError: no such library"),
    ("sys.stdin.readline(); print('out of memory', file=sys.stderr); sys.exit(7)", "its process ended with status 7: out of memory"),
    ("sys.exit('at once')", "its process ended with status 1: at once"),
    ("time.sleep(60)", "no answer within 1 s"),
])
def test_a_process_that_cannot_gives_its_reason(tmp_path, body, reason):
    with process.Process("x", python=fake_python(tmp_path, body), threads=1) as p:
        with pytest.raises(ContestantFailed, match=reason):
            p.ask("describe", patience=1.0 if "sleep" in body else 60.0)


def test_the_worker_answers_for_a_name_it_does_not_know():
    with process.Process("nobody", threads=1) as p:
        with pytest.raises(ContestantFailed, match="name must start with ours, gpu, training or one of .* got 'nobody'"):
            p.ask("describe", patience=60.0)


def test_reasons_name_no_folder_of_this_machine():
    said = process.presentable("OSError: /opt/some/where/libggml.so: version\n  not found (required by a/b/c)")
    assert said == "OSError: libggml.so: version not found (required by a/b/c)"
    assert len(process.presentable("word " * 100)) == 200


def test_the_worker_averages_and_measures_memory():
    runs = SimpleNamespace(calls=0)
    runs.call = lambda: setattr(runs, "calls", runs.calls + 1)
    assert worker.run(runs, do="time", call="call", repeat=7) > 0
    assert runs.calls == 7
    # in a process of its own, as when measuring: this one may have had, and given back, more than the call takes
    code = (
        "from types import SimpleNamespace; import numpy as np; from benchmarks import worker; "
        "print(worker.run(SimpleNamespace(big=lambda: np.ones(64_000_000, np.uint8)), do='memory', call='big'))"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 60_000_000


class FailsInTheMiddle:
    """A process whose contestant answers at first and fails when its turn comes."""

    def __init__(self, who, failing):
        self.fails = who == failing

    def ask(self, do, **_):
        if do == "time" and self.fails:
            raise ContestantFailed("RuntimeError: out of memory")
        return 0.001


@pytest.mark.parametrize("failing", ["ggml, C", targets.OURS])
def test_a_peer_may_fail_in_its_turn_but_ours_stops_the_run(failing):
    said = []
    bench = SimpleNamespace(effort={"least": 1, "most": 1, "budget": 1.0}, say=said.append)
    with sections.group(bench) as g:
        g.peers = {"ggml, C"}
        g.processes = {who: FailsInTheMiddle(who, failing) for who in (targets.OURS, "ggml, C")}
        if failing == targets.OURS:
            with pytest.raises(ContestantFailed, match="out of memory"):
                g.compare("forward", dict.fromkeys(g.processes, 1e-7), T=8)
        else:
            g.compare("forward", dict.fromkeys(g.processes, 1e-7), T=8)
            assert [row["who"] for row in g.rows] == [targets.OURS] and list(g.processes) == [targets.OURS]
            assert g.missing == [{"who": "ggml, C", "where": "forward", "why": "RuntimeError: out of memory"}]
            assert said == ["   ggml, C: RuntimeError: out of memory"]


# ---- the peers' environment ----
def pip_that(returncode, stderr=""):
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    return run, asked


def test_a_peer_that_cannot_be_installed_is_reported(tmp_path, monkeypatch):
    run, asked = pip_that(1, "WARNING: something\nERROR: No matching distribution found for ggml-python==0.0.45\n")
    monkeypatch.setattr(peers, "VENV", tmp_path)
    monkeypatch.setattr(peers.subprocess, "run", run)
    missing = peers.install({"ggml.txt"}, say=lambda _: None)
    assert missing == {"ggml.txt": "pip could not install it (ERROR: No matching distribution found for ggml-python==0.0.45)"}
    peers.install({"ggml.txt"}, say=lambda _: None)
    assert len([c for c in asked if "pip" in c]) == 2  # tried again the next time


def test_installing_twice_does_nothing(tmp_path, monkeypatch):
    run, asked = pip_that(0)
    monkeypatch.setattr(peers, "VENV", tmp_path)
    monkeypatch.setattr(peers.subprocess, "run", run)
    for _ in range(2):
        assert peers.install({"mlx.txt"}, say=lambda _: None) == {}
    assert len([c for c in asked if "pip" in c]) == 1


def test_versions_of_the_peers_are_pinned():
    for name in {peer.requirements for peer in (*peers.PEERS, *peers.ONE_TOKEN, *gpu.PEERS)}:
        lines = [line for line in (peers.FOLDER / name).read_text().splitlines() if not line.startswith("#")]
        assert lines and all("==" in line for line in lines)


# ---- the results file ----
def new_document(tmp_path, **changes):
    source = tmp_path / "source.py"
    source.write_text(changes.pop("code", "x = 1"))
    settings = {"threads": 2, "quick": False, "versions": {"torch": "1"}, "missing": {}, "sources": [source], **changes}
    return store.new("cpu", **settings)


SECTION = {"rows": [], "missing": [], "versions": {}}


def test_a_results_file_survives_the_round_trip(tmp_path):
    document = new_document(tmp_path)
    document["sections"]["context"] = {"rows": [{"error": math.nan}, {"error": math.inf}], "missing": [], "versions": {}, "seconds": 1.0}
    store.write(tmp_path / "r.json", document)
    found = store.read(tmp_path / "r.json")
    assert found["sections"]["context"]["rows"] == [{"error": None}, {"error": None}]
    assert found["fingerprint"] == document["fingerprint"] and set(found) == store.FIELDS
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("text, message", [
    ("{", "not JSON"), ("[]", "no schema"), ('{"schema": 99}', "no schema"), ('{"schema": 1}', "must have the fields"),
])
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        store.read(tmp_path / "r.json")
    document, why = store.continued(tmp_path / "r.json", new_document(tmp_path))
    assert document["sections"] == {} and message in why


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    path, asked = tmp_path / "r.json", []

    def stops():
        raise KeyboardInterrupt

    sections = {"forward": lambda: asked.append("forward") or dict(SECTION), "decode": stops}
    with pytest.raises(KeyboardInterrupt):
        measure(new_document(tmp_path), path, sections, lambda _: None)
    document, why = store.continued(path, new_document(tmp_path))
    assert "continuing" in why and list(document["sections"]) == ["forward"]
    sections["decode"] = lambda: asked.append("decode") or dict(SECTION)
    measure(document, path, sections, lambda _: None)
    assert asked == ["forward", "decode"]
    assert store.read(path)["finished"] is not None
    assert "complete" in store.continued(path, new_document(tmp_path))[1]


@pytest.mark.parametrize("changes", [
    {"threads": 1}, {"quick": True}, {"versions": {"torch": "2"}}, {"code": "x = 2"}, {"missing": {"a": "b"}},
])
def test_a_run_under_other_conditions_is_not_continued(tmp_path, changes):
    document = new_document(tmp_path)
    document["sections"]["forward"] = {**SECTION, "seconds": 1.0}
    store.write(tmp_path / "r.json", document)
    found, why = store.continued(tmp_path / "r.json", new_document(tmp_path, **changes))
    assert found["sections"] == {} and "have changed" in why


# ---- tables and targets ----
def operator_row(who, ms, T=8192, **more):
    timing = {"best_ms": ms, "median_ms": ms, "clean": 3, "taken": 3}
    return {"who": who, "T": T, **timing, "flops": inputs.Shape(T).flops(), "gemm_gflops": 200.0, "error": 1e-7, "wrong": None, **more}


def full_document(tmp_path):
    """A made-up run in which every target holds."""
    document = new_document(tmp_path, missing={"mlx-lm on MLX's CPU backend": "pip could not install it"})
    document["finished"] = document["started"]
    short = [operator_row("minimodel kda", 60.0 * T / 8192, T) for T in (512, 2048, 65536)]
    peers_ms = {"ggml, C": 150.0, "fla naive_chunk_kda, chunk 64": 600.0}
    forward = [*short, operator_row("minimodel kda", 60.0), *(operator_row(who, ms) for who, ms in peers_ms.items())]
    backward = [
        operator_row("minimodel kda", 200.0, extra_bytes=400_000_000),
        operator_row("fla naive_chunk_kda, chunk 64", 2000.0, extra_bytes=4e9, wrong="wrong: not finite"),
        operator_row("transformers Kimi Linear, chunk 16", 6000.0, extra_bytes=4e9),
    ]
    fresh = [{"who": "minimodel kda", "call": "forward", "T": 8192, "first_ms": 90.0, "second_ms": 60.0, "extra_bytes": 2e8}]
    fresh += [{**fresh[0], "call": "forward_backward", "extra_bytes": 4e8}]
    steps = [{**operator_row(who, 0.04, 1), "B": 1} for who in ("minimodel kda", "minimodel kda_step_, unchecked")]
    contexts = [{**steps[0], "context": n} for n in (1024, 1_048_576)]
    speeds = {("minimodel", 512): 600.0, ("plain", 512): 1000.0, ("minimodel", 8192): 900.0, ("plain", 8192): 700.0}
    training = [
        {"who": f"{who} model", "T": T, "B": 1, "best_ms": 1.0, "median_ms": 1.0, "clean": 1, "taken": 1, "tokens_per_second": s,
         "parameters": 5, "active": 4}
        for (who, T), s in speeds.items()
    ]
    shares = [{"T": 512, "B": 4, "part": "delta rule", "share": 0.7}, {"T": 512, "B": 4, "part": "router", "share": 0.3}]
    rows = {"forward": forward, "after_a_pause": [*map(dict, short)], "forward_backward": backward, "fresh_process": fresh,
            "decode": steps, "context": contexts, "training": training, "step_profile": shares}
    document["sections"] = {name: {**SECTION, "rows": r, "seconds": 1.0} for name, r in rows.items()}
    return document


def holds(document):
    return {t.what: t.holds for t in targets.targets(document)}


def test_all_targets_are_computed_and_hold(tmp_path):
    found = holds(full_document(tmp_path))
    assert len(found) == 16 and all(found.values())


@pytest.mark.parametrize("section, who, change, target", [
    ("forward", "minimodel", {"best_ms": 80.0}, "share of the matrix-product limit"),
    ("forward", "ggml", {"best_ms": 50.0}, "ggml"),
    ("forward", "fla", {"best_ms": 470.0}, "best KDA in PyTorch"),
    ("forward_backward", "minimodel", {"best_ms": 220.0}, "against the forward"),
    ("forward_backward", "transformers", {"best_ms": 2900.0}, "best differentiable KDA"),
    ("fresh_process", "minimodel", {"first_ms": 2100.0}, "first call"),
    ("fresh_process", "minimodel", {"extra_bytes": 7e8}, "extra memory"),
    ("decode", "minimodel kda_step_", {"best_ms": 0.06}, "B = 1"),
    ("decode", "minimodel kda", {"best_ms": 0.06}, "checks its inputs"),
    ("training", "minimodel", {"tokens_per_second": 499.0}, "T = 512"),
])
def test_each_target_can_fail(tmp_path, section, who, change, target):
    document = full_document(tmp_path)
    for row in document["sections"][section]["rows"]:
        if row["who"].startswith(who) and row.get("T", 8192) in (1, 512, 8192):
            row.update(change)
    failed = [what for what, ok in holds(document).items() if not ok]
    assert any(target in what for what in failed)


def test_a_longer_text_that_costs_more_a_token_is_not_flat(tmp_path):
    document = full_document(tmp_path)
    document["sections"]["forward"]["rows"][2]["best_ms"] *= 1.2
    document["sections"]["context"]["rows"][1]["best_ms"] *= 1.2
    failed = [what for what, ok in holds(document).items() if not ok]
    flat = "forward: time a token from T = 512 to 65536"
    assert failed == [f"{flat}, calls in a row", "decode step after 1k to 1M tokens"]
    document["sections"]["after_a_pause"]["rows"][0]["best_ms"] *= 1.2
    assert f"{flat}, one call after a pause" in [what for what, ok in holds(document).items() if not ok]


def test_a_peer_with_wrong_results_is_shown_but_not_compared_with(tmp_path):
    document = full_document(tmp_path)
    text = "\n".join(report.as_text(t) for t in report.tables(document))
    assert "wrong: not finite" in text
    (target,) = [t for t in targets.targets(document) if "differentiable KDA" in t.what]
    assert target.measured == "30 times (transformers Kimi Linear, chunk 16)"


def test_a_cheaper_rule_is_a_peer_of_its_own(tmp_path):
    document = full_document(tmp_path)
    document["sections"]["forward"]["rows"].append(operator_row("transformers Gated DeltaNet (one decay a head)", 300.0))
    failed = [what for what, ok in holds(document).items() if not ok]
    assert failed == ["forward, T = 8192, against the best PyTorch peer of any rule"]


def test_tables_are_rectangular_and_name_what_is_missing(tmp_path):
    document = full_document(tmp_path)
    document["sections"]["forward"]["missing"].append({"who": "ggml, C", "where": "forward, T = 65536", "why": "no answer within 120 s"})
    made = report.tables(document)
    assert all(len(row) == len(table.header) and all(isinstance(cell, str) for cell in row) for table in made for row in table.rows)
    assert ("mlx-lm on MLX's CPU backend", "everything", "pip could not install it") in made[-1].rows
    assert ("ggml, C", "forward, T = 65536", "no answer within 120 s") in made[-1].rows
    ours = [row for table in made if table.title == "Forward" for row in table.rows if row[:2] == ("T = 8192", "minimodel kda")]
    assert ours[0][4:6] == ("34.7 %", "1")  # 8192 * 4 * 126,976 FLOPs at 200 GFLOP/s are 20.8 ms of 60
    limit = [row for table in made if table.title == "Forward" for row in table.rows if row[:2] == ("T = 8192", "limit: matrix products")]
    assert limit[0][2] == "20.8"


@pytest.mark.parametrize("ms, written", [
    (0.04166, "0.0417"), (0.9, "0.900"), (3.456, "3.46"), (36.44, "36.4"), (149.6, "150"), (6165.2, "6,170"), (9.999, "10.0"),
])
def test_times_have_three_digits(ms, written):
    assert report.milliseconds(ms) == written


def test_the_page_is_rewritten_between_its_markers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n\n{report.page_block('cpu', None)}\n\nBetween.\n\n{report.page_block('gpu', None)}\n\nAfter.\n")
    document = full_document(tmp_path)
    report.write_page(page, "cpu", document)
    report.write_page(page, "cpu", document)
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "GPU numbers are missing" in text
    assert text.count("| target | wanted | measured | holds |") == 1
    with pytest.raises(ValueError, match="markers of 'tpu'"):
        report.NOTHING_YET["tpu"] = ""
        report.write_page(page, "tpu", None)
    del report.NOTHING_YET["tpu"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_published_page_says_what_the_published_results_say(kind):
    path = RESULTS / f"{kind}.json"
    document = store.read(path) if path.exists() else None
    assert report.page_block(kind, document) in PAGE.read_text(encoding="utf-8")


# ---- the plain Transformer, and the training step ----
@pytest.mark.parametrize("config", [K3Config.meeting(), K3Config.mini()], ids=["meeting", "mini"])
def test_the_twin_has_as_many_active_parameters(config):
    model = transformer.twin(config)
    one_channel = 3 * config.hidden_size * config.num_hidden_layers
    assert abs(transformer.active_parameters(model) - parameter_budget(config).active) <= one_channel / 2
    assert len(model.attention) == config.num_hidden_layers and model.embed.weight.shape == (config.vocab_size, config.hidden_size)


def test_the_twin_attends_as_softmax_does():
    torch.manual_seed(0)
    layer = transformer.Attention(32, 4).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    q, k, v = (part.view(2, 7, 4, 8).transpose(1, 2) for part in (x @ layer.qkv.weight.T).split(32, -1))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    by_hand = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 7, 32) @ layer.out.weight.T
    torch.testing.assert_close(layer(x), by_hand)


@pytest.mark.bad_input
def test_a_config_without_room_for_a_feed_forward_is_refused():
    few = {"moe_intermediate_size": 1, "num_experts_per_token": 1, "num_shared_experts": 0, "intermediate_size": 1}
    tiny = K3Config.mini().replace(hidden_size=2048, **few)
    with pytest.raises(ValueError, match="fewer than attention"):
        transformer.swiglu_width(tiny)


@pytest.mark.parametrize("variant", ["k3", "transformer"])
def test_a_training_step_learns(variant):
    run = Training(1, variant)
    run.prepare(T=16, B=1)
    losses = [run.step() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert abs(run.describe()["active"] / parameter_budget(K3Config.mini()).active - 1) < 0.001


# ---- the profile ----
def event(name, *, start=0, own=0.0, sequence=-1, parent=None):
    around = SimpleNamespace(start=start)
    return SimpleNamespace(name=name, sequence_nr=sequence, cpu_parent=parent, self_cpu_time_total=own, time_range=around)


def test_backward_time_belongs_to_the_part_that_made_the_node():
    step = event("part: rest", own=1.0)
    rule = event("part: rule", parent=step)
    mul = event("aten::mul", start=1, own=2.0, sequence=7, parent=rule)
    inner = event("part: norm", parent=rule)
    early = event("aten::detach", start=2, own=0.0, sequence=8, parent=step)  # makes no node: the next operator carries the same number
    sum_ = event("aten::sum", start=3, own=3.0, sequence=8, parent=inner)
    engine = event(f"{profiling.ENGINE}: MulBackward0", start=9, sequence=7, parent=step)
    node = event("MulBackward0", start=9, own=0.5, sequence=7, parent=engine)
    product = event("aten::mul", start=9, own=4.0, sequence=20, parent=node)
    other = event(f"{profiling.ENGINE}: SumBackward0", start=8, own=1.5, sequence=8, parent=step)
    unknown = event(f"{profiling.ENGINE}: torch::autograd::AccumulateGrad", start=10, own=2.0, parent=step)
    outside = event("aten::randn", own=100.0)
    found = profiling.by_part([step, rule, mul, inner, early, sum_, engine, node, product, other, unknown, outside])
    assert found == pytest.approx({"rule": 6.5 / 14, "norm": 4.5 / 14, "rest": 3.0 / 14})


def test_a_real_step_is_split_into_its_parts_and_nothing_stays_wrapped():
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in profiling.PARTS]
    model, ids = K3ForCausalLM(K3Config.meeting()), torch.arange(20)[None]
    optimizer = PerHeadMuon(model, lr=1e-3)

    def step():
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = profiling.shares(model, step)
    named = {part for _, _, part in profiling.PARTS}
    assert sum(found.values()) == pytest.approx(1)
    assert named <= set(found) <= named | {profiling.REST}
    assert all(vars(owner).get(name) is was for owner, name, was in before)
    assert "forward" not in vars(model.lm_head)


# ---- the command ----
def test_the_command_measures_what_is_asked_for_and_publishes_nothing(tmp_path, monkeypatch, capsys):
    import benchmarks.__main__ as command

    monkeypatch.setattr(command, "WORKING", tmp_path)
    asked = []
    sections = {name: lambda bench, name=name: asked.append((name, bench.quick)) or dict(SECTION) for name in ("forward", "context")}
    monkeypatch.setattr(command, "SECTIONS", sections)
    monkeypatch.setattr(command, "ROOT", tmp_path.parent)
    assert command.main(["--quick", "--no-peers", "--only", "forward"]) == 0
    document = store.read(tmp_path / "cpu-quick-forward.json")
    assert asked == [("forward", True)] and list(document["sections"]) == ["forward"] and "published" not in capsys.readouterr().out


# ---- the GPU mode, without a GPU ----
def test_without_a_gpu_the_gpu_mode_says_so_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--gpu"]) == 1
    assert capsys.readouterr().out == "There is no CUDA device on this machine, so nothing was measured on a GPU.\n"


class FakeGpu:
    """Stands for a process with a GPU: our kernel takes 1 ms a call, theirs can't be imported."""

    def __init__(self, name, **_):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, do, **arguments):
        if self.name == "gpu:fla":
            raise ContestantFailed("ModuleNotFoundError: No module named 'fla'")
        if do == "save":
            np.savez(arguments["path"], o=np.ones((1, 1)), S=np.ones((1, 1)), **{n: np.ones((1, 1)) for n in ()})
        return {"describe": {"version": "minimodel", "gpu": "made up"}, "gemm": 0.002, "copy": 0.001, "seconds": 0.001}.get(do)


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "Process", FakeGpu)
    monkeypatch.setattr(gpu, "reference", lambda *_, **__: {"o": np.ones((1, 1)), "S": np.ones((1, 1))})
    return SimpleNamespace(threads=1, quick=False, missing={}, say=lambda _: None, effort={"least": 1, "most": 2, "budget": 1.0})


def test_the_gpu_mode_counts_flops_and_bytes(fake_gpu):
    found = gpu.operator(fake_gpu)
    row = found["rows"][0]
    work = 16384 * 32 * 126_976
    assert row["rate"] == pytest.approx(work / 1e-3 / 1e12)
    assert row["share"] == pytest.approx((work / 1e-3) / (2 * gpu.GEMM**3 / 0.002))
    step = gpu.decode(fake_gpu)["rows"][0]
    assert step["rate"] == pytest.approx(2 * 4 * 32 * 128 * 128 / 1e-3 / 1e9)
    assert found["missing"][0]["why"] == "ModuleNotFoundError: No module named 'fla'"


def test_the_gpu_tables_are_written(fake_gpu, tmp_path):
    document = {**new_document(tmp_path), "kind": "gpu", "finished": "now"}
    document["sections"] = {name: {**section(fake_gpu), "seconds": 1.0} for name, section in gpu.SECTIONS.items()}
    text = report.page_block("gpu", json.loads(json.dumps(document)))
    assert "TFLOP/s" in text and "GB/s" in text and "GPU: made up" in text and "missing" not in text.split("What could not")[0]


def test_every_section_has_a_table():
    assert set(report.TABLES) == {*sections.SECTIONS, *gpu.SECTIONS}
