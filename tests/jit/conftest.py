"""One lab for all tests, tests/toolkit's: .cache/toolkit, or TOOLKIT_LAB."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/toolkit"))

import lab  # noqa: E402
from kernels import Kernels  # noqa: E402

PARTS = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.2.*"


@pytest.fixture(scope="session")
def toolkit_lab():
    return lab.Lab(Path(os.environ.get("TOOLKIT_LAB") or TOP / ".cache/toolkit").resolve())


@pytest.fixture(scope="session")
def made(toolkit_lab):
    env = toolkit_lab.environment("jit", PARTS, flashinfer="0.7.2.post1")
    home = env.module().result["cuda_home"]
    yield env, home
    toolkit_lab.discard(env)


@pytest.fixture
def kernels(made, tmp_path):
    """A deploy's folders of one test's own, in the session's environment."""
    return Kernels(*made, tmp_path)


@pytest.fixture(scope="session")
def built(made, tmp_path_factory):
    """silu_and_mul and page for 12.0f, built once, for the tests that change nothing."""
    found = Kernels(*made, tmp_path_factory.mktemp("built"))
    found.first = found.warm(modules=["silu_and_mul", "page"])
    return found
