"""``python -m animations``: lists, renders once, and a wrong call fails in one line."""

from __future__ import annotations

import pytest

from animations import missing

if line := missing():
    pytest.skip(line, allow_module_level=True)

from animations import __main__ as command
from animations.stage import StageScene


def test_scenes_are_listed_with_their_captions(capsys):
    command.main([])
    printed = capsys.readouterr().out
    for name, scene in command.scenes().items():
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


@pytest.mark.scene
@pytest.mark.parametrize("format", ["mp4", "webm", "gif", "png"])
def test_render_writes_the_format_and_skips_what_is_up_to_date(format, tmp_path, monkeypatch, capsys):
    from manim import tempconfig

    class Short(StageScene):
        """A question, briefly."""

        def construct(self):
            self.play(self.say("Is the board larger now?"))

    monkeypatch.setattr(command, "scenes", lambda: {"Short": Short})
    monkeypatch.setattr(command, "fingerprint", lambda: "same code")
    with tempconfig({"media_dir": str(tmp_path)}):
        command.main(["render", "--all", "--format", format])
        (made,) = [path for path in tmp_path.rglob(f"Short*.{format}")]
        first = made.stat().st_mtime_ns
        assert made.stat().st_size > 500 and "up to date" not in capsys.readouterr().out
        command.main(["render", "Short", "--format", format])
        assert made.stat().st_mtime_ns == first and "up to date" in capsys.readouterr().out
        monkeypatch.setattr(command, "fingerprint", lambda: "changed code")
        command.main(["render", "Short", "--format", format])
        assert made.stat().st_mtime_ns > first and "up to date" not in capsys.readouterr().out


def test_a_setting_of_the_teacher_makes_films_out_of_date(monkeypatch):
    before = command.fingerprint()
    assert command.fingerprint() == before
    monkeypatch.setenv("K3_UPDATE", "Friday")
    assert command.fingerprint() != before
