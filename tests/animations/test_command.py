"""``python -m animations``: lists, renders once, and a wrong call fails in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations import __main__ as command
from animations import films
from animations.sheet import contact_sheet
from animations.stage import StageScene


def test_scenes_are_listed_with_their_captions(capsys):
    command.main([])
    printed = capsys.readouterr().out
    for name, scene in films.scenes().items():
        assert f"{name}  (" in printed and scene.__doc__.splitlines()[0] in printed
    assert "KDAWhiteboard  (whiteboard.py)" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["Nope"], "unknown scene Nope; the scenes are "), ([], "give the names"), (["KDAWhiteboard", "--all"], "or --all")],
)
def test_a_wrong_command_says_what_is_wrong(arguments, says, capsys):
    with pytest.raises(SystemExit):
        command.main(["render", *arguments])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["render", "--all"], ["sheet"]], ids=" ".join)
@pytest.mark.parametrize("jobs", ["0", "-1", "100000"])
def test_a_number_of_jobs_that_cannot_be_is_refused(arguments, jobs, capsys):
    with pytest.raises(SystemExit):
        command.main([*arguments, "--jobs", jobs])
    assert f"--jobs must lie in 1..{os.cpu_count()}, the number of this machine's cores, got {jobs}" in capsys.readouterr().err


@pytest.mark.scene
@pytest.mark.parametrize("format", ["mp4", "webm", "gif", "png"])
def test_render_writes_the_format_and_skips_what_is_up_to_date(format, tmp_path, monkeypatch, capsys):
    from manim import tempconfig

    class Short(StageScene):
        """A question, briefly."""

        def construct(self):
            self.play(self.say("Is the board larger now?"))

    monkeypatch.setattr(films, "scenes", lambda: {"Short": Short})
    monkeypatch.setattr(films, "fingerprint", lambda: "same code")
    with tempconfig({"media_dir": str(tmp_path)}):
        command.main(["render", "--all", "--format", format])
        (made,) = [path for path in tmp_path.rglob(f"Short*.{format}")]
        first = made.stat().st_mtime_ns
        assert made.stat().st_size > 500 and "up to date" not in capsys.readouterr().out
        command.main(["render", "Short", "--format", format])
        assert made.stat().st_mtime_ns == first and "up to date" in capsys.readouterr().out
        monkeypatch.setattr(films, "fingerprint", lambda: "changed code")
        command.main(["render", "Short", "--format", format])
        assert made.stat().st_mtime_ns > first and "up to date" not in capsys.readouterr().out


def test_a_setting_of_the_teacher_makes_films_out_of_date(monkeypatch):
    before = films.fingerprint()
    assert films.fingerprint() == before
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert films.fingerprint() != before


class Good(StageScene):
    """A question, briefly."""

    def construct(self):
        self.play(self.say("Is the board larger now?"))


class Bad(StageScene):
    """A scene that fails."""

    def construct(self):
        raise ValueError("facts: too many")


@pytest.mark.scene
def test_a_scene_that_fails_is_named_and_the_others_are_rendered(tmp_path, monkeypatch, capsys):
    from manim import tempconfig

    monkeypatch.setattr(films, "scenes", lambda: {"Bad": Bad, "Good": Good})
    with tempconfig({"media_dir": str(tmp_path)}), pytest.raises(SystemExit, match="^not rendered: Bad$"):
        command.main(["render", "--all"])
    assert "Bad: failed: ValueError: facts: too many" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*.mp4") if "partial" not in str(path)] == ["Good.mp4"]


@pytest.mark.scene
def test_two_at_once_from_the_command_line(tmp_path):
    """Each in a process of its own, started from ``python -m``; manim's media folder lies where it is started."""
    path = os.pathsep.join([str(films.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command_line = [sys.executable, "-m", "animations", "render", "QuantileBalancing", "KDAStep", "--format", "png", "--jobs", "2"]
    done = subprocess.run(command_line, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    large = {path.name: path.stat().st_size > 5_000 for path in tmp_path.rglob("*.png")}
    assert large == {"QuantileBalancing.png": True, "KDAStep.png": True}


@pytest.mark.scene
def test_the_contact_sheet_shows_three_frames_of_each_film(tmp_path, monkeypatch):
    from manim import tempconfig
    from PIL import Image

    monkeypatch.setattr(films, "scenes", lambda: {"Good": Good})
    with tempconfig({"media_dir": str(tmp_path)}):
        command.main(["sheet", "--out", str(tmp_path / "sheet.png")])
        film, up_to_date = films.render(Good)
    assert up_to_date
    one = Image.open(tmp_path / "sheet.png")
    contact_sheet({name: film for name in "abc"}, tmp_path / "three.png")
    three = Image.open(tmp_path / "three.png")
    assert three.height > one.height and three.width == one.width and len(one.convert("RGB").getcolors(100_000)) > 5
