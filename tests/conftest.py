"""Every test runs with the shapes in minimodel's signatures checked: jaxtyping reads them, beartype enforces them.

A test that gives wrong input on purpose is marked `bad_input`. It runs without these checks, so that it meets what a user meets:
the functions' own errors.
"""
import os
import sys

import jaxtyping
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: test workers share the cores
jaxtyping.install_import_hook("minimodel", "beartype.beartype")
checked = sys.meta_path[0].should_instrument  # Triton reads its kernels' source: a wrapper around them would hide their names
sys.meta_path[0].should_instrument = lambda name: checked(name) and not name.rpartition(".")[2].startswith("triton_")
settings.register_profile("repeatable", derandomize=True, deadline=None)  # the same examples in every run
settings.load_profile("repeatable")


def pytest_configure():
    """Without a GPU, Triton's kernels run in its interpreter on CPU tensors. Triton asks for this when a kernel is defined."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def shape_checks(request):
    """Switch the checks off for tests marked bad_input, and on again after them."""
    off = request.node.get_closest_marker("bad_input") is not None
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", off)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """A test that can't run here says why; nothing is skipped silently."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; there is none on this machine"))
