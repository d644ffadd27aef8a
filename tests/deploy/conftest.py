"""The host under test comes from the environment: molecule's verify step sets it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Fleet


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    inventory = os.environ.get("FLEET_INVENTORY")
    if not inventory:
        pytest.skip("FLEET_INVENTORY is not set: these tests run in a molecule scenario")
    return Fleet(inventory, os.environ["FLEET_HOST"])
