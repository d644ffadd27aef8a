"""The wheel folder: what pins mean, when torch is a CUDA build, and when a folder is finished."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "scripts" / "tools"


def load(name):
    spec = importlib.util.spec_from_file_location(f"gpufleet_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


wheelhouse = load("wheelhouse")

CPU = {"version": "2.13.0+cpu", "requires_dist": ["filelock", "sympy>=1.13.3"]}


@pytest.mark.parametrize(
    "metadata, cuda",
    [
        (CPU, False),
        ({"version": "2.13.0", "requires_dist": ["filelock", "nvidia-cublas==13.1; platform_system == 'Linux'"]}, True),
        ({"version": "2.13.0", "requires_dist": ["cuda-toolkit[cublas]==13.0.2; platform_system == 'Linux'"]}, True),
        ({"version": "2.13.0", "requires_dist": ["NVIDIA_nccl_cu13"]}, True),
        ({"version": "2.13.0", "requires_dist": ["filelock", "nvidia-x; extra == 'opt'"]}, False),
        ({"version": "2.13.0"}, False),  # a platform's own build, as on aarch64
    ],
)
def test_is_cuda_build(metadata, cuda):
    assert wheelhouse.is_cuda_build(metadata) is cuda


def test_a_cuda_build_stops_before_anything_is_downloaded(monkeypatch, tmp_path):
    calls = []

    def pip(*args, capture=False):
        calls.append(args[0])
        assert args[0] != "download"
        metadata = {"version": "2.13.0", "requires_dist": ["nvidia-cublas"]}
        return json.dumps({"install": [{"metadata": metadata}]}) if capture else ""

    monkeypatch.setattr(wheelhouse, "pip", pip)
    lock = tmp_path / "lock"
    lock.write_text("torch==2.13.0\n")
    recipe = wheelhouse.Recipe(tmp_path / "wheels", lock, ())
    with pytest.raises(wheelhouse.WheelhouseError, match=r"3 GB.*\n.*DEMO_TORCH_INDEX"):
        wheelhouse.build(recipe, "3.11", "")
    assert calls == ["install"]
    assert not (tmp_path / "wheels").exists()


def test_read_pins():
    assert wheelhouse.read_pins("# c\nPyYAML==6.0.4\n\nhuggingface_hub==1.33.0  # why\n") == {
        "pyyaml": "6.0.4",
        "huggingface-hub": "1.33.0",
    }


@pytest.mark.parametrize("line", ["torch>=2", "torch", "x==", "x==1; python_version < '3'"])
def test_read_pins_refuses(line):
    with pytest.raises(wheelhouse.WheelhouseError, match="not a pin"):
        wheelhouse.read_pins(line)


@pytest.mark.parametrize(
    "pins, wheels, missing",
    [
        ({"torch": "2.13.0"}, ["torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"], []),
        ({"torch": "2.13.0+cpu"}, ["torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"], ["torch==2.13.0+cpu"]),
        ({"huggingface-hub": "1.33.0"}, ["huggingface_hub-1.33.0-py3-none-any.whl"], []),
        ({"a": "1.0"}, ["a-1.0.1-py3-none-any.whl"], ["a==1.0"]),
        ({"a": "1.0"}, [], ["a==1.0"]),
    ],
)
def test_missing_pins(pins, wheels, missing):
    assert wheelhouse.missing_pins(pins, wheels) == missing


def test_only_a_sealed_and_whole_folder_is_complete(tmp_path):
    wheel = tmp_path / "part" / "a-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"x" * 10)
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "old-1.0-py3-none-any.whl").write_bytes(b"y")
    assert not wheelhouse.is_complete(folder, "f")
    wheelhouse._publish(folder, [wheel], "f")
    assert wheelhouse.is_complete(folder, "f")
    assert not wheelhouse.is_complete(folder, "other")
    assert not (folder / "old-1.0-py3-none-any.whl").exists()
    (folder / wheel.name).write_bytes(b"x" * 9)
    assert not wheelhouse.is_complete(folder, "f")


def test_locks_name_their_local_projects():
    for recipe in (wheelhouse.CPU_ENGINE, wheelhouse.STANDIN):
        pins = wheelhouse.read_pins(recipe.lock.read_text(encoding="utf-8"))
        for project in recipe.projects:
            assert wheelhouse.canonicalize_name(wheelhouse._project_name(project)) in pins


demo = load("demo")


@pytest.mark.parametrize(
    "want, gb, count", [(8, 20, 8), (8, 13.8, 8), (8, 13.7, 7), (8, 2.6, 1), (8, 2.5, 0), (2, 99, 2)]
)
def test_fit(want, gb, count):
    assert demo.fit(want, gb) == count


def test_servers_says_when_it_lowers_the_number(capsys):
    def meminfo(gb):
        return f"MemTotal: 1 kB\nMemAvailable: {int(gb * 1024**2)} kB\n"

    assert demo.servers(8, 0, meminfo(6.0)) == 3
    assert "3 servers instead of 8" in capsys.readouterr().out
    assert demo.servers(8, 8, meminfo(2.0)) == 8  # those that run hold their memory already
    with pytest.raises(demo.DemoError, match="one server needs"):
        demo.servers(8, 0, meminfo(2.0))


def test_table():
    assert demo.table({"boot": 1.0, "chat": 2.5}).splitlines()[-1].split() == ["all", "3.5", "s"]
