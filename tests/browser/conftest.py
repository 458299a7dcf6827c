"""The browser tests need Chromium or Chrome. On a person's machine they are skipped without it; in continuous integration they fail."""
import os

import pytest

from tests.browser.lab import find_chromium

ADVICE = "no Chromium or Chrome was found: apt-get install chromium, or python -m playwright install chromium, or set CHROMIUM to its path"


@pytest.fixture(scope="session")
def chromium():
    path = find_chromium()
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(ADVICE)
    return path
