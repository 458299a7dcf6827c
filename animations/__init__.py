"""Scenes of the course, drawn by manim from the same traces as the figures and the panels.

``python -m animations`` lists them and renders them. Nothing else in the project imports this package.
"""

from __future__ import annotations

INSTALL = (
    "pip install -e '.[animations]'; if that fails on Debian or Ubuntu, first: "
    "apt-get install gcc libc6-dev python3-dev pkg-config libcairo2-dev libpango1.0-dev"
)


def missing() -> str | None:
    """One line that says what to install before scenes can be drawn, or None when everything is there."""
    try:
        import manim  # noqa: F401  (a missing system library shows here too, as ImportError or OSError)
        import typst  # noqa: F401  (the formulas)
    except (ImportError, OSError) as error:
        return f"The scenes can't be drawn here ({str(error).splitlines()[0]}). Install: {INSTALL}"
    return None
