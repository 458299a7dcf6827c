"""Training on any text: the bytes, the command, and a process that is killed and started again."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minimodel.tasks import text
from minimodel.train import train_text, training_bytes
from minimodel.train.__main__ import main
from minimodel.train.text import PRESETS, free_bytes

ROOT = Path(__file__).parents[2]
SMALL = {"steps": 3, "rows": 2, "length": 24, "progress": False}


@pytest.fixture
def poem(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"{n} green bottles hanging on the wall, über {n * n} mile.\n" for n in range(99, 0, -1)), encoding="utf-8")
    return path


# ---- bytes ----


def test_a_file_is_its_bytes(poem):
    source = text.read(poem)
    assert bytes(source.content.tolist()) == poem.read_bytes()
    assert source.name.startswith(f"poem.txt, {poem.stat().st_size:,} bytes, sha256 ")
    poem.write_bytes(poem.read_bytes()[:-2] + b"!\n")
    assert text.read(poem).name != source.name  # one byte is enough to be another text


def test_windows_are_pieces_of_the_training_part(poem):
    source = text.read(poem)
    whole = poem.read_bytes()
    ids = text.training_batch(source, 0, 5, rows=40, length=100)
    assert ids.shape == (40, 100) and ids.dtype == torch.long
    assert all(bytes(row.tolist()) in whole[: source.split] for row in ids)
    assert len({bytes(row.tolist()) for row in ids}) > 30
    assert torch.equal(ids, text.training_batch(source, 0, 5, rows=40, length=100))
    assert not torch.equal(ids, text.training_batch(source, 0, 6, rows=40, length=100))
    assert not torch.equal(ids, text.training_batch(source, 1, 5, rows=40, length=100))


def test_both_ends_of_the_training_part_are_drawn():
    source = text.ByteText("counting", torch.arange(240, dtype=torch.uint8))
    ids = torch.cat([text.training_batch(source, 0, step, rows=50, length=4) for step in range(50)])
    assert source.split == 228 and (int(ids.min()), int(ids.max())) == (0, 227)


def test_held_out_windows_lie_behind_the_training_part():
    source = text.ByteText("counting", torch.arange(240, dtype=torch.uint8))
    assert text.held_out(source, rows=3, length=4).tolist() == [[228, 229, 230, 231], [232, 233, 234, 235], [236, 237, 238, 239]]
    assert text.held_out(source, rows=9, length=5).tolist() == [[228, 229, 230, 231, 232], [235, 236, 237, 238, 239]]  # no room for nine
    assert text.held_out(source, rows=1, length=5).tolist() == [[228, 229, 230, 231, 232]]


def test_the_documentation_of_this_python():
    source = text.documentation()
    assert "pydoc_data/topics.py" in source.name and len(source.content) > 300_000
    assert b'The "assert" statement' in bytes(source.content.tolist())


@pytest.mark.bad_input
def test_texts_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="data: .*none.txt is not a file"):
        text.read(tmp_path / "none.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="data: .*empty.txt is empty"):
        text.read(tmp_path / "empty.txt")
    source = text.ByteText("counting", torch.arange(240, dtype=torch.uint8))
    for use in (lambda n: text.training_batch(source, 0, 0, rows=1, length=n), lambda n: text.held_out(source, rows=1, length=n)):
        for length in (1, 13):
            with pytest.raises(ValueError, match=f"length must lie in 2..12, a twentieth of the 240 bytes of data, got {length}"):
                use(length)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="this Python comes without pydoc_data/topics.py; name a text file"):
        text.documentation()


# ---- training ----


def test_it_learns_bytes_it_has_not_seen(poem, capsys):
    model, log = train_text("mini", data=poem, steps=8, rows=4, length=48, lr=8e-3, progress=False)
    assert log[0]["loss"] == pytest.approx(math.log(256), rel=0.05) and log[-1]["held_out_bits"] < 6.5
    assert model.config.vocab_size == 256 and next(model.parameters()).dtype == torch.float32
    held_out = text.held_out(text.read(poem), rows=16, length=48)
    assert len(held_out) > 4  # more than one pass
    with torch.no_grad():
        bits = model(held_out, labels=held_out).loss.item() / math.log(2)
    assert log[-1]["held_out_bits"] == pytest.approx(bits, rel=1e-4)
    said = capsys.readouterr().out
    assert text.read(poem).name in said and "mini with 256 bytes as vocabulary" in said and "estimate of the most at one time" in said


def test_every_switch_at_once(poem):
    settings = {**SMALL, "steps": 2, "dtype": "bfloat16", "accumulate": 2}
    plain, less = (train_text("mini", data=poem, recompute=again, **settings) for again in (False, True))
    assert plain[1] == less[1]
    assert all(torch.equal(x, y) for x, y in zip(plain[0].state_dict().values(), less[0].state_dict().values(), strict=True))


# ---- killed ----


def lines(folder):
    path = folder / "log.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def command(poem, out):
    options = ["--preset", "mini", "--data", poem, "--out", out, "--steps", 8, "--rows", 2, "--length", 90, "--checkpoint-every", 1]
    return [sys.executable, "-m", "minimodel.train", *map(str, options), "--threads", "1"]


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_for_bit(poem, tmp_path):
    """Killed by a signal that no program can catch, wherever it was then; started again by the same command."""
    whole, out = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(poem, whole), cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(command(poem, out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(lines(out)) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and 3 <= len(lines(out)) < 8
    (out / ".checkpoint.safetensors.1.tmp").write_bytes(b"half")  # what a process killed while writing leaves
    subprocess.run(command(poem, out), cwd=ROOT, check=True, capture_output=True)
    assert lines(out) == lines(whole) and len(lines(whole)) == 8
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.safetensors", "log.jsonl", "model"]
    for file in ("checkpoint.safetensors", "model/model.safetensors"):
        assert (out / file).read_bytes() == (whole / file).read_bytes(), file


def test_another_text_under_the_same_name_is_refused(poem, tmp_path):
    train_text("mini", tmp_path / "run", data=poem, **{**SMALL, "steps": 1})
    poem.write_text(poem.read_text()[:-1])
    with pytest.raises(ValueError, match="belongs to another recipe, config or data"):
        train_text("mini", tmp_path / "run", data=poem, **{**SMALL, "steps": 1})


# ---- the command ----


@pytest.mark.parametrize("line, words", [
    ("--preset mini --rows 3 --accumulate 2", "accumulate=2 must divide rows=3"),
    ("--preset mini --rows 0", "rows must be an integer of at least 1, got 0"),
    ("--preset mini --length 99999999", "length must lie in 2.."),
    ("--preset mini --device tpu", "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
    ("--preset mini --data none.txt", "data: none.txt is not a file"),
    ("--preset base --rows 4096 --length 4096", "device: 4096 rows of 4096 bytes a pass take about"),
    ("meeting --projects 9", "projects must lie in 1..8, got 9"),
])  # fmt: skip
@pytest.mark.bad_input
def test_what_cannot_be_done_is_said_in_one_sentence(line, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert str(stopped.value).startswith(f"python -m minimodel.train: {words}") and "\n" not in str(stopped.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line, words", [
    ("", "give either meeting or --preset"),
    ("meeting --preset mini", "give either meeting or --preset"),
    ("meeting --recompute", "--recompute does not go with meeting"),
    ("meeting --checkpoint-every 5", "--checkpoint-every does not go with meeting"),
    ("--preset mini --projects 3", "--projects does not go with --preset"),
    ("--preset meeting", "invalid choice: 'meeting' (choose from 'mini', 'small', 'base')"),
])  # fmt: skip
def test_options_that_do_not_go_together(line, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the GPU that this machine has")
def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--preset", "small", "--device", "cuda", "--dtype", "bfloat16"])
    assert str(stopped.value) == (
        f"python -m minimodel.train: device: 'cuda' was asked for, and torch {torch.__version__} finds 0 CUDA devices here"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS[:2])
def test_on_a_gpu(preset):
    """The command of the README, a few steps of it; the estimate holds for what was really taken."""
    torch.cuda.reset_peak_memory_stats()
    settings = {"accumulate": 2, "device": "cuda", "dtype": "bfloat16", "recompute": True, "progress": False}
    model, log = train_text(preset, steps=3, rows=4, length=512, **settings)
    assert log[-1]["loss"] < log[0]["loss"] and next(model.parameters()).is_cuda
    need = training_bytes(model.config, rows=2, length=512, dtype=torch.bfloat16, recompute=True)
    assert torch.cuda.max_memory_allocated() < 1.2 * need.total


def test_free_memory_is_not_more_than_there_is():
    free = free_bytes(torch.device("cpu"))
    assert free is None or 0 < free <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
