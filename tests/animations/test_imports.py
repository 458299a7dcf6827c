"""What scenes need and what they must not load, each tried in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from animations import missing

ROOT = Path(__file__).resolve().parents[2]


def test_without_manim_one_line_says_what_to_install():
    code = "import runpy, sys; sys.modules['manim'] = None; sys.argv = ['animations']; runpy.run_module('animations', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and "pip install" in done.stderr and "libpango1.0-dev" in done.stderr


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_scenes_do_not_load_plotly_or_widgets():
    code = "import sys, animations.films as a; a.scenes(); print([m for m in ('plotly', 'ipywidgets', 'anywidget') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
