"""The role's own tasks, by ansible-playbook on this machine: the tag alone, published kernels, the strict gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._environment import published_environment
from conftest import TOP
from kernels import read_only

GATE = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: gpufleet.sglang.sglang_server, tasks_from: jit_gate.yml}
"""


def play(playbook, values, *more):
    values = {"ansible_python_interpreter": sys.executable, **values}
    argv = ["ansible-playbook", str(playbook), "-i", "localhost,", "-c", "local", "-e", json.dumps(values), *more]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "ANSIBLE_NOCOLOR": "1", "PATH": path}
    return subprocess.run(argv, capture_output=True, check=False, text=True, cwd=TOP, env=env)


@pytest.fixture
def runtime(kernels):
    """The CPU torch brings no CUDA runtime; with torch for CUDA it is loaded before any kernel."""
    path = kernels.env.site / "runtime.pth"
    (library,) = (kernels.env.tree / "lib").glob("libcudart.so.*")
    path.write_text(f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n")
    yield
    path.unlink()


@pytest.mark.matrix
@pytest.mark.usefixtures("runtime")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_the_tag_alone_publishes_and_the_strict_gate_ends_the_run(kernels, tmp_path):
    values = {
        "sglang_server_venv": f"{kernels.env.folder}/venv",
        "sglang_server_model": f"{tmp_path}/model",
        "sglang_server_load_format": "dummy",
        "sglang_server_release": "r1",
        "sglang_server_releases_dir": f"{tmp_path}/releases",
        "sglang_server_config_dir": f"{tmp_path}/etc",
        "sglang_server_state_dir": f"{tmp_path}/state",
        "sglang_server_cache_dir": str(kernels.cache),
        "sglang_server_user": "root",
        "sglang_server_group": "root",
        "sglang_server_jit_modules": ["silu_and_mul"],
        "sglang_server_jit_derive": False,
        "sglang_server_jit_publish": True,
        "sglang_server_jit_strict": True,
        "cuda_toolkit_fix_arch_list": [kernels.arch],
    }
    for name in ("etc", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "etc/toolkit.json").write_text((kernels.env.config / "toolkit.json").read_text())
    done = play("playbooks/deploy.yml", values, "--tags", "jit")
    assert done.returncode == 0, done.stdout
    assert "1 FlashInfer modules published in" in done.stdout, done.stdout

    kept = f"{tmp_path}/kernels/r1"
    serving = published_environment(kept, f"{tmp_path}/state", "")
    with read_only(kernels.cache), read_only(Path(kept)):
        served = kernels.serve("getter", "silu_and_mul", **serving, PATH="/usr/bin:/bin", CUDA_HOME="/nonexistent")
    assert (served.rc, served.compiled) == (0, []), served.output

    again = play("playbooks/deploy.yml", values, "--tags", "jit")
    assert "changed=0" in again.stdout, again.stdout

    gate = tmp_path / "gate.yml"
    gate.write_text(GATE)
    canary = {"canary": True, "environment": kernels.environment}
    values.update(__sglang_server_plan={"plan": {"instances": [canary]}})
    assert play(gate, values).returncode == 0
    assert kernels.serve("getter", "gelu_and_mul").compiled == ["gelu_and_mul"]  # as a canary that needs more
    ended = play(gate, values)
    assert ended.returncode != 0
    assert "1 modules were compiled by a server: gelu_and_mul" in ended.stdout, ended.stdout
    assert play(gate, values).returncode == 0
