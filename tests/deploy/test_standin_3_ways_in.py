"""The same deploy by other ways in: an installed collection, the other ansible-core (the fleet is up)."""

from __future__ import annotations

import os
import subprocess

import pytest
from fleet import ROOT

GPUS = range(8)
OLD = ROOT / ".cache" / "venv-2.19" / "bin" / "ansible-playbook"


@pytest.fixture(scope="module")
def installed(fleet, tmp_path_factory):
    """The collection, built and installed as a user would."""
    folder = tmp_path_factory.mktemp("collections")
    (folder / "ansible.cfg").touch()
    galaxy = fleet.bin("ansible-galaxy")
    subprocess.run(
        [galaxy, "collection", "build", "--output-path", str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    (archive,) = folder.glob("gpufleet-sglang-*.tar.gz")
    subprocess.run(
        [galaxy, "collection", "install", "--offline", "-p", str(folder / "installed"), str(archive)],
        cwd=folder,
        check=True,
        capture_output=True,
        # else it finds this clone's link, and says that the collection is installed already
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(folder / "installed"),
        },
    )
    return folder / "installed"


def test_the_installed_collection_has_no_development_files(installed):
    names = {path.name for path in (installed / "ansible_collections/gpufleet/sglang").iterdir()}
    assert {"plugins", "roles", "playbooks", "README.md", "LICENSE", "meta"} <= names
    assert not names & {".cache", ".venv", ".git", ".collections", "ansible.cfg", ".ci"}


def absolute(fleet):
    """The inventories by absolute path, for a run from another folder."""
    fleet.inventory_args = [
        str(ROOT / arg) if arg != "-i" and not os.path.isabs(arg) else arg for arg in fleet.inventory_args
    ]


def test_as_an_installed_collection_from_another_folder(fleet, installed, tmp_path):
    absolute(fleet)
    pids = fleet.pids(GPUS)
    elsewhere = {
        "ANSIBLE_HOST_KEY_CHECKING": "false",
        "ANSIBLE_CONFIG": str(installed.parent / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(installed),
    }
    run = fleet.play("gpufleet.sglang.deploy", cwd=tmp_path, env=elsewhere)
    assert run.changed == 0, run.output
    assert fleet.pids(GPUS) == pids


def test_with_ansible_core_2_19_on_python_3_11(fleet):
    if not OLD.exists():
        pytest.skip("scripts/test makes it: scripts/bootstrap --python 3.11 --venv .cache/venv-2.19 controller test")
    pids = fleet.pids(GPUS)
    run = fleet.play("deploy", program=str(OLD), env={"ANSIBLE_HOST_KEY_CHECKING": "false"})
    assert run.changed == 0, run.output
    run = fleet.play(
        "deploy",
        program=str(OLD),
        extra={"sglang_server_instances": [{"gpu": "1", "max_running_requests": 5}]},
        env={"ANSIBLE_HOST_KEY_CHECKING": "false"},
    )
    after = fleet.pids(GPUS)
    assert [gpu for gpu in GPUS if after[gpu] != pids[gpu]] == [1]
