"""``python -m minimodel.train``: the course's meeting model, or a preset on any text. Stopped at any moment, the same command goes on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from minimodel.io import save_pretrained
from minimodel.tensor_files import check_writable
from minimodel.train.loop import Diverged, set_threads
from minimodel.train.meeting import NOTES, train_meeting
from minimodel.train.text import PRESETS, train_text

MEETING = ("projects", "start", "notes", "residue", "past")  # options of one command only; a default of None shows that they were not given
TEXT = ("data", "device", "dtype", "rows", "length", "accumulate", "recompute", "checkpoint_every")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m minimodel.train", description="Train the course's meeting model on a CPU, or a K3 of any size on any text."
    )
    p.add_argument("task", nargs="?", choices=["meeting"], help="the course's meeting model; or give --preset")
    p.add_argument("--preset", choices=PRESETS, help="train this preset to predict the next byte of a text")
    p.add_argument("--out", type=Path, help="folder of the checkpoint, the log and the model; a stopped run continues (default runs/NAME)")
    p.add_argument("--steps", type=int, help="default 2400 for meeting, 1000 for a text")
    p.add_argument("--lr", type=float, help="highest learning rate; default 8e-3 for meeting, 2e-3 for a text")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, help="CPU threads")
    meeting = p.add_argument_group("meeting")
    meeting.add_argument("--projects", type=int, help="projects in a note, at most (default 8)")
    meeting.add_argument("--start", type=Path, help="folder of a trained model to go on from")
    meeting.add_argument("--notes", choices=NOTES, help="what is read: short notes first (default), or those of later training")
    meeting.add_argument("--past", type=float, help="how many times over the first layer's memory starts with what another note left")
    meeting.add_argument("--residue", type=float, help="noise that the first layer's memory starts from, at most (default 0)")
    text = p.add_argument_group("a text, with --preset")
    text.add_argument("--data", type=Path, help="any file, read as bytes; default Python's own documentation (pydoc_data/topics.py)")
    text.add_argument("--device", help="cpu (default), cuda or cuda:N")
    text.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the passes (default float32); updates are always float32")
    text.add_argument("--rows", type=int, help="windows a step (default 16)")
    text.add_argument("--length", type=int, help="bytes a window (default 512)")
    text.add_argument("--accumulate", type=int, help="passes a step, each over its share of the rows (default 1)")
    text.add_argument("--recompute", action="store_true", default=None, help="keep layer inputs only: less memory, a third more work")
    text.add_argument("--checkpoint-every", type=int, help="steps between checkpoints and held-out scores (default 100)")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Train, then save the model beside the run's checkpoint. What cannot be done ends the program with one sentence."""
    p = parser()
    options = p.parse_args(arguments)
    if (options.task is None) == (options.preset is None):
        p.error("give either meeting or --preset")
    mine, other = (MEETING, TEXT) if options.task else (TEXT, MEETING)
    for name in other:
        if getattr(options, name) is not None:
            p.error(f"--{name.replace('_', '-')} does not go with {options.task or '--preset'}")
    folder = options.out or Path("runs") / (options.task or options.preset)
    given = {name: getattr(options, name) for name in ("steps", "lr", "seed", *mine)}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        set_threads(options.threads)
        if (folder / "model").exists():
            check_writable(folder / "model", "--out")
        if options.task:
            model, log = train_meeting(folder, **{"steps": 2400, "projects": 8, **given})
        else:
            model, log = train_text(options.preset, folder, **given)
        save_pretrained(model, folder / "model")
    except (ValueError, MemoryError, OSError, Diverged) as error:
        raise SystemExit(f"{p.prog}: {error}") from None
    print(f"saved {folder / 'model'}: {json.dumps(log[-1])}")


if __name__ == "__main__":
    main()
