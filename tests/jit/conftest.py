"""One lab for all tests, tests/toolkit's: .cache/toolkit, or TOOLKIT_LAB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/toolkit"))

import lab  # noqa: E402
from kernels import Kernels  # noqa: E402

LIBRARIES = "cuda-toolkit[cublas,curand]==13.2.*"  # FlashInfer's norm includes their headers
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


@pytest.fixture(scope="session")
def whole(toolkit_lab, tmp_path_factory):
    """The environment with all headers, as a real one has: 2 MB out of wheels of 520, fetched once."""
    env = toolkit_lab.environment("jit-whole", PARTS, flashinfer="0.7.2.post1")
    kept = toolkit_lab.folder / "library-headers"
    if not (kept / ".done").exists():
        folder = tmp_path_factory.mktemp("wheels")
        argv = [f"{toolkit_lab.base}/bin/python", "-m", "pip", "download", "-q", "-d", str(folder), LIBRARIES]
        subprocess.run(argv, check=True)
        kept.mkdir(exist_ok=True)
        for wheel in folder.glob("nvidia_cu[br]*.whl"):
            with zipfile.ZipFile(wheel) as file:
                for name in file.namelist():
                    if "/include/" in name and name.endswith(".h"):
                        (kept / Path(name).name).write_bytes(file.read(name))
        shutil.rmtree(folder)
        (kept / ".done").touch()
    for header in kept.glob("*.h"):
        shutil.copy2(header, env.tree / "include")
    yield env, env.module().result["cuda_home"]
    toolkit_lab.discard(env)


@pytest.fixture
def kernels(made, tmp_path):
    """A deploy's folders of one test's own, in the session's environment."""
    found = Kernels(*made, tmp_path)
    yield found
    shutil.rmtree(found.job().folder, ignore_errors=True)


@pytest.fixture(scope="session")
def built(made, tmp_path_factory):
    """silu_and_mul and page for 12.0f, built once, for the tests that change nothing."""
    found = Kernels(*made, tmp_path_factory.mktemp("built"))
    found.first = found.warm(modules=["silu_and_mul", "page"])
    return found
