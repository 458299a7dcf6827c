"""The site is built once, into a temporary folder, as `make docs` builds it."""
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import chromium  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    import docs

    folder = tmp_path_factory.mktemp("docs") / "site"
    docs.build(ROOT, folder)
    return folder
