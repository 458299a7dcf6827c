"""Score a trained meeting model on held-out notes, and publish a finished run into the package.

    python -m minimodel.pretrained score                                   # the committed checkpoint
    python -m minimodel.pretrained publish runs/meeting ... --minutes 197  # the last run's model, the curve of all
    python -m minimodel.pretrained toolbox                                 # train and publish the five models of the toolbox
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from minimodel import toolbox
from minimodel.io import from_pretrained, save_pretrained
from minimodel.model import K3ForCausalLM
from minimodel.pretrained import FOLDER, load_pretrained
from minimodel.tasks import meeting
from minimodel.tensor_files import check_writable
from minimodel.train.loop import Diverged, set_threads

QUESTIONS = 16  # blanks at the end of a note


@torch.no_grad()
def scores(model: K3ForCausalLM, *, answers: int = 1000) -> dict:
    """Accuracy by number of projects at the trained length, by note length up to eight times that, and the article's question."""
    table = []
    cells = [(n, meeting.LONGEST) for n in range(1, 9)] + [(8, meeting.LONGEST * times) for times in (2, 4, 8)] + [(1, meeting.LONGEST * 8)]
    for projects, length in cells:
        per_note = min(QUESTIONS, 5 * projects)
        wanted = answers if length == meeting.LONGEST else answers * 2 // 5  # long notes take long
        notes = meeting.held_out_notes(0, -(-wanted // per_note), projects=projects, length=length, final_questions=per_note)
        result = meeting.score(model, notes, rows=max(1, 4096 // length))
        row = {
            "projects": projects, "tokens": length, "answers": sum(result.asked.values()), "accuracy": round(result.accuracy, 4),
            "by_slot": {slot: round(x, 4) for slot, x in result.by_slot().items()},
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        table.append(row)
    text = " ".join((*meeting.ARTICLE, meeting.question("day")))
    p = model(torch.tensor([meeting.encode(text)])).logits[0, -1].softmax(-1)
    return {"held_out": table, "p_thursday": round(float(p[meeting.encode("Thursday")[0]]), 4)}


TRAIN = "python -m minimodel.train meeting --threads 1"
COMMANDS = f"""{TRAIN} --out runs/meeting
{TRAIN} --out runs/dense --notes dense --start runs/meeting/model --steps 6500 --lr 1.2e-2
{TRAIN} --out runs/cold --notes cold --start runs/dense/model --steps 6000 --lr 1e-2
{TRAIN} --out runs/old --notes old --start runs/cold/model --steps 16000 --lr 8e-3
{TRAIN} --out runs/used --notes old --residue 0.2 --seed 1 --start runs/old/model --steps 16000 --lr 8e-3
{TRAIN} --out runs/calm --notes old --residue 0.1 --seed 2 --start runs/used/model --steps 2500 --lr 3e-3
python -m minimodel.pretrained publish runs/meeting runs/dense runs/cold runs/old runs/used runs/calm --minutes"""


def readme(result: dict, steps: int, minutes: int) -> str:
    """The page beside the checkpoint: how it was made, and how well it does."""
    rows = "\n".join(f"| {r['projects']} | {r['tokens']:,} | {100 * r['accuracy']:.2f} % | {r['answers']:,} |" for r in result["held_out"])
    return f"""# The meeting model

`K3Config.meeting()`, trained on a CPU by

```
{COMMANDS} {minutes}
```

{steps:,} steps of 2,048 tokens took {minutes} minutes; the longest note has {meeting.LONGEST:,} tokens. The first run learns the
language of the notes and their names. Later ones read notes with more writes in them, and notes in which a few facts change all the
time while others grow old; in the fourth these have to survive still more writes, and in the last two the memory starts from noise,
as if a long past had left something behind. `curve.json` holds the loss of every tenth step. The same commands give the same model
with the same version of the code, on the same processor with the same number of threads; elsewhere rounding differs, and so does
the model a little. The first run was made before the delta-rule operator was rewritten, the second before it got kernels in C.

Scores on held-out notes: a blank is right when the likeliest of all {len(meeting.VOCABULARY)} words is the latest value.

| projects | tokens of the note | right | blanks asked |
|---|---|---|---|
{rows}

The article's question, "The meeting is now on ___": Thursday with probability {result["p_thursday"]:.4f}.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minimodel.pretrained", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser("score", help="score a checkpoint folder, or the committed model")
    score.add_argument("folder", nargs="?", type=Path)
    publish = commands.add_parser("publish", help="copy a finished run into the package, with its curve and scores")
    publish.add_argument("runs", type=Path, nargs="+", help="folders in the order of training; the last one's model is published")
    publish.add_argument("--minutes", type=int, required=True, help="how long the training took, for the page beside the model")
    tools = commands.add_parser("toolbox", help="train the toolbox's models and put them into the package")
    tools.add_argument("--runs", type=Path, default=Path("runs/toolbox"), help="folder of the runs; stopped ones continue")
    tools.add_argument("--only", choices=toolbox.TECHNIQUES, help="train one technique's model")
    tools.add_argument("--threads", type=int, help="CPU threads")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError, Diverged) as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def load(folder: Path) -> K3ForCausalLM:
    """A meeting model from a folder. Raises ValueError, with a hint where the folder is that of a run."""
    try:
        model = from_pretrained(folder)
    except ValueError as error:
        meant = next((path for path in (folder / "model", folder.parent) if (path / "config.json").is_file()), None)
        raise ValueError(f"{error}{f'; the model is in {meant}' if meant else ''}") from None
    if model.config.vocab_size != len(meeting.VOCABULARY):
        raise ValueError(f"folder {folder} has a model with {model.config.vocab_size} words, the notes have {len(meeting.VOCABULARY)}")
    return model


def read_log(run: Path) -> list[dict]:
    """The rows of a run's log. Raises ValueError if it is missing or damaged."""
    path = run / "log.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if not all(isinstance(row, dict) and type(row.get("step")) is int for row in rows):
            raise ValueError("a line is no row of a log")
    except (OSError, ValueError) as error:
        raise ValueError(f"runs: {path} can't be read as the log of a run ({error})") from None
    return rows


def run(options: argparse.Namespace) -> None:
    if options.command == "toolbox":
        set_threads(options.threads)
        check_writable(FOLDER / "toolbox")
        for technique in [options.only] if options.only else toolbox.TECHNIQUES:
            toolbox.publish(technique, *toolbox.train_toolbox(technique, options.runs / technique))
        return
    if options.command == "score":
        print(json.dumps(scores(load(options.folder) if options.folder else load_pretrained()), indent=1))
        return
    model, log = load(options.runs[-1] / "model"), []
    for folder in options.runs:
        log += [{**row, "step": len(log) + row["step"]} for row in read_log(folder)]
    target = FOLDER / "meeting"
    check_writable(target)  # scoring takes minutes
    result = scores(model)
    save_pretrained(model, target)
    keep = ("step", "loss", "accuracy_1", "accuracy_8")
    curve = [{k: round(v, 4) for k, v in row.items() if k in keep} for row in log if row["step"] % 10 == 0 or "accuracy_8" in row]
    (target / "curve.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in curve) + "\n]\n")
    (target / "scores.json").write_text(json.dumps(result, indent=1) + "\n")
    (target / "README.md").write_text(readme(result, len(log), options.minutes))


if __name__ == "__main__":
    main()
