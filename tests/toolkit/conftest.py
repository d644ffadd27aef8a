"""One lab for all tests: .cache/toolkit, or TOOLKIT_LAB. What pip downloads stays in pip's own cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lab
import pytest


@pytest.fixture(scope="session")
def toolkit_lab():
    folder = Path(os.environ.get("TOOLKIT_LAB") or lab.TOP / ".cache/toolkit").resolve()
    made = lab.Lab(folder)
    yield made
    shutil.rmtree(folder / "env", ignore_errors=True)
