"""The toolbox models: one body, five attentions, notes with an answer in every one, and a command that makes what is committed."""
import json

import pytest
import torch

from minimodel import K3ForCausalLM, from_pretrained, toolbox
from minimodel.pretrained import FOLDER
from minimodel.pretrained.__main__ import main
from minimodel.tasks import meeting
from minimodel.toolbox import LENGTH, ROWS, TECHNIQUES, load_toolbox, toolbox_config


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_models_differ_in_their_attention_only(technique):
    config = toolbox_config(technique)
    assert {config.mixer(i) for i in range(config.num_hidden_layers)} == {technique}
    others = {n for n, _ in K3ForCausalLM(config).named_parameters() if ".self_attn." not in n}
    assert others == {n for n, _ in K3ForCausalLM(toolbox_config("mha")).named_parameters() if ".self_attn." not in n}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_committed_models_are_small_and_score_as_written(technique):
    folder = FOLDER / "toolbox" / technique
    assert (folder / "model.safetensors").stat().st_size < 1_500_000
    model, written = load_toolbox(technique), json.loads((folder / "scores.json").read_text())
    assert model.config == toolbox_config(technique) and model.lm_head.weight.dtype == torch.float32
    now = toolbox.scores(model)
    assert now["article"] == pytest.approx(written["article"], abs=0.01) and now["article"] > 0.9
    assert now["p_thursday"] == pytest.approx(written["p_thursday"], abs=0.01) and now["p_thursday"] > 0.5
    assert f"| `{technique}` | {written['steps']} |" in (FOLDER / "toolbox" / "README.md").read_text()


def test_a_batch_is_a_pure_function_of_its_step_and_asks_in_every_row():
    (ids, labels), (again, _), (other, _) = (toolbox.training_batch(0, step) for step in (3, 3, 4))
    assert ids.shape == labels.shape == (ROWS, LENGTH)
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    asked = labels != -100
    assert bool(asked.any(1).all())
    values = {meeting.encode(v)[0] for words in meeting.SLOTS.values() for v in words}
    assert set(labels[asked].tolist()) <= values


def test_the_articles_situation_is_an_opening_an_update_and_a_question():
    for note in toolbox.article_notes(20):
        assert note.text.count(".") == 3 and note.text.count(meeting.BLANK) == 1
        assert sum(label != -100 for label in note.labels) == 1
    assert toolbox.article_notes(3)[2].text == toolbox.article_notes(9)[2].text


def test_training_publishes_a_model_that_can_be_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(toolbox, "STEPS", 2)
    model, log = toolbox.train_toolbox("gqa", tmp_path / "run", progress=False)
    assert [row["step"] for row in log] == [0, 1] and log[1]["accuracy"] <= 1
    toolbox.publish("gqa", model, log, tmp_path / "out")
    stored = from_pretrained(tmp_path / "out" / "gqa", dtype=torch.float32)
    for name, x in model.state_dict().items():
        assert torch.equal(stored.state_dict()[name], x.bfloat16().float()), name
    assert "| `gqa` | 2 |" in (tmp_path / "out" / "README.md").read_text()
    again, _ = toolbox.train_toolbox("gqa", tmp_path / "run", progress=False)  # nothing is left to do
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_the_command_trains_and_publishes(tmp_path, monkeypatch):
    monkeypatch.setattr(toolbox, "STEPS", 1)
    published = []
    monkeypatch.setattr(toolbox, "publish", lambda technique, model, log: published.append((technique, len(log))))
    main(["toolbox", "--runs", str(tmp_path), "--only", "mla"])
    assert published == [("mla", 1)] and (tmp_path / "mla" / "log.jsonl").exists()


@pytest.mark.parametrize("call", [lambda: toolbox_config("rnn"), lambda: load_toolbox("rnn"), lambda: toolbox.train_toolbox("rnn")])
def test_an_unknown_technique_is_named(call):
    with pytest.raises(ValueError, match="^technique must be one of mha, gqa, mla, sliding_window, kda, got 'rnn'"):
        call()


def test_an_impossible_size_is_named():
    with pytest.raises(ValueError, match="num_key_value_groups=3"):
        toolbox_config("gqa", groups=3)
