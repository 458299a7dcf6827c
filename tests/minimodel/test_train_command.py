"""What cannot be done is said before a step is trained or a note is scored: folders, seeds, threads, models to start from."""

import pytest

import minimodel.pretrained.__main__ as pretrained
import minimodel.train.meeting as training
from minimodel import K3ForCausalLM, save_pretrained
from minimodel.config import K3Config
from minimodel.pretrained import FOLDER
from minimodel.train import Recipe, train_meeting
from minimodel.train.__main__ import main
from minimodel.train.loop import Diverged
from tests.minimodel.common import tiny_config


def sentence(command, *arguments):
    with pytest.raises(SystemExit) as stopped:
        command([str(a) for a in arguments])
    said = str(stopped.value)
    assert "\n" not in said and said.startswith("python -m minimodel.")
    return said


@pytest.fixture
def no_work(monkeypatch):
    """Neither a batch nor a score is ever asked for."""
    for place, name in ((training.meeting, "training_batch"), (training, "later_batch"), (pretrained.meeting, "score")):
        monkeypatch.setattr(place, name, lambda *a, name=name, **k: pytest.fail(f"{name} was called"))


@pytest.fixture(scope="module")
def other_kind(tmp_path_factory):
    """A model that does not know the notes' words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_pretrained(K3ForCausalLM(tiny_config(), seed=0), folder)
    return folder


@pytest.mark.bad_input
def test_a_folder_that_cannot_be_written(tmp_path, no_work, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below", "/proc/nope" if (tmp_path / "/proc/self").exists() else file):
        assert f"folder: {place} can't be written as a folder" in sentence(main, "meeting", "--out", place)
    assert f"folder: {file / 'mla'} can't be" in sentence(pretrained.main, "toolbox", "--only", "mla", "--runs", file)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model").touch()
    assert f"--out: {tmp_path / 'run/model'} can't be written as a folder" in sentence(main, "meeting", "--out", tmp_path / "run")
    (tmp_path / "run/model").unlink()
    (tmp_path / "run/model").symlink_to(FOLDER / "meeting")
    (tmp_path / "run/log.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    monkeypatch.setattr(pretrained, "FOLDER", file)
    assert f"folder: {file / 'meeting'} can't be" in sentence(pretrained.main, "publish", tmp_path / "run", "--minutes", 1)


@pytest.mark.bad_input
def test_a_folder_that_fails_at_the_end(tmp_path, monkeypatch):
    import minimodel.train.__main__ as command

    def full(*a):
        raise OSError(28, "No space left on device")

    def diverged(*a, **k):
        raise Diverged("loss is nan at step 7: lower lr=1.0 or look at the batch")

    monkeypatch.setattr(command, "train_meeting", lambda folder, **k: (None, [{}]))
    monkeypatch.setattr(command, "save_pretrained", full)
    assert "No space left on device" in sentence(main, "meeting", "--out", tmp_path)
    monkeypatch.setattr(command, "train_meeting", diverged)
    assert "loss is nan at step 7" in sentence(main, "meeting", "--out", tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize("threads", [-1, 0, 999999999999])
def test_threads(threads, tmp_path, no_work):
    words = f"--threads must lie in 1..1024, got {threads}"
    assert words in sentence(main, "meeting", "--out", tmp_path, f"--threads={threads}")
    assert words in sentence(pretrained.main, "toolbox", "--runs", tmp_path, f"--threads={threads}")


@pytest.mark.bad_input
def test_seeds(tmp_path, no_work):
    assert "seed must lie in -2147483648..4294967295, got 4294967296" in sentence(main, "meeting", "--seed", 2**32, "--out", tmp_path)
    assert "seed must be a whole number of 64 bits" in sentence(main, "--preset", "mini", "--seed", 10**22, "--out", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.bad_input
def test_a_folder_that_holds_no_meeting_model(tmp_path, no_work, other_kind):
    file, run = tmp_path / "file", tmp_path / "run"
    file.touch()
    run.mkdir()
    (run / "model").symlink_to(FOLDER / "meeting")
    for place in (tmp_path / "nowhere", file):
        assert f"folder {place} does not exist" in sentence(pretrained.main, "score", place)
        assert f"folder {place / 'model'} does not exist" in sentence(pretrained.main, "publish", place, "--minutes", 1)
    assert sentence(pretrained.main, "score", run).endswith(f"; the model is in {run / 'model'}")
    assert sentence(pretrained.main, "publish", run / "model", "--minutes", 1).endswith(f"; the model is in {run / 'model'}")
    assert f"folder {other_kind} has a model with" in sentence(pretrained.main, "score", other_kind)
    for text in (None, "{", "[]", '{"loss": 1}'):
        if text:
            (run / "log.jsonl").write_text(text)
        assert "log.jsonl can't be read as the log of a run" in sentence(pretrained.main, "publish", run, "--minutes", 1)


@pytest.mark.bad_input
def test_a_start_of_another_kind(tmp_path, no_work, other_kind):
    said = sentence(main, "meeting", "--residue", 1, "--start", FOLDER / "toolbox/mla", "--out", tmp_path / "run")
    assert "start: residue=1 and past=0 fill the memory of a first layer with KDA" in said and "MLA" in said.upper()
    assert "start: folder" in sentence(main, "meeting", "--start", tmp_path / "nowhere", "--out", tmp_path / "run")
    said = sentence(main, "meeting", "--start", other_kind, "--out", tmp_path / "run")
    assert f"start: the model in {other_kind} has a vocabulary of" in said


def test_a_run_goes_on_from_its_own_start_only(tmp_path, monkeypatch):
    """And a run without a start is named as it always was: it goes on."""
    seen = []
    monkeypatch.setattr(training, "train", lambda model, batch, recipe, **k: seen.append(recipe) or [])
    for seed in (0, 1):
        save_pretrained(K3ForCausalLM(K3Config.meeting(), seed=seed), tmp_path / f"{seed}")
    for start in ("0", "0", "1"):
        train_meeting(start=tmp_path / start, progress=False)
    assert seen[0] == seen[1] != seen[2]
    train_meeting(progress=False)
    assert seen[3] == Recipe(steps=100, lr=8e-3, data="meeting notes, curriculum, seed 0, up to 1 projects")
