"""A GPU that had a server and is gone: named, and the seven others keep their numbers, units and ports."""

from __future__ import annotations

import dataclasses
import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import Gone, broken_nodes, missed, settle
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import parse_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._host import Host
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan import removed_units
from ansible_collections.gpufleet.sglang.plugins.module_utils._preflight import look_at_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result
from ansible_collections.gpufleet.sglang.plugins.module_utils._slots import resolve
from hosts import UUIDS, smi

EIGHT = parse_gpus(smi())
ROLLED_OUT = dict(enumerate(UUIDS))


def listed(*present):
    """What the driver tells when only these of the eight are there: it counts from 0 without a gap."""
    return [dataclasses.replace(EIGHT[old], index=new) for new, old in enumerate(present)]


def rolled_out(tmp_path, gpus):
    """The files of servers that an earlier deploy rendered."""
    (tmp_path / "etc").mkdir()
    for gpu in gpus:
        data = {"gpu": gpu, "unit": f"sglang@{gpu}.service", "host": "127.0.0.1", "port": 30000 + gpu,
                "uuid": UUIDS[gpu], "argv": [], "environment": {}, "environment_file": "", "unit_file": ""}  # fmt: skip
        (tmp_path / f"etc/{gpu}.json").write_text(json.dumps(data))


def by_number(gpus):
    return {gpu.index: gpu.uuid for gpu in gpus}


OTHER = dataclasses.replace(EIGHT[0], uuid="GPU-99999999-1111")


@pytest.mark.parametrize(
    ("gpus", "rolled_out", "numbers", "gone"),
    [
        (EIGHT, ROLLED_OUT, ROLLED_OUT, []),
        (EIGHT, {}, ROLLED_OUT, []),  # the first deploy
        (EIGHT, {0: None, 1: None}, ROLLED_OUT, []),  # servers of device cpu
        (listed(0, 1, 2, 4, 5, 6, 7), ROLLED_OUT, {n: UUIDS[n] for n in (0, 1, 2, 4, 5, 6, 7)}, [3]),
        (listed(1, 2, 3, 4, 5, 6), ROLLED_OUT, {n: UUIDS[n] for n in range(1, 7)}, [0, 7]),
        # after GPU 3 was taken out of the inventory its number stays free
        (
            listed(0, 1, 2, 4),
            {0: UUIDS[0], 1: UUIDS[1], 2: UUIDS[2], 4: UUIDS[4]},
            {n: UUIDS[n] for n in (0, 1, 2, 4)},
            [],
        ),
        # a new card in its place takes its number, one that came beside does not
        (
            [*listed(0, 1), dataclasses.replace(OTHER, index=2), dataclasses.replace(EIGHT[3], index=3)],
            {n: UUIDS[n] for n in range(4)},
            {0: UUIDS[0], 1: UUIDS[1], 2: OTHER.uuid, 3: UUIDS[3]},
            [],
        ),
        (
            [
                dataclasses.replace(EIGHT[0], index=0),
                dataclasses.replace(EIGHT[2], index=1),
                dataclasses.replace(OTHER, index=2),
            ],
            {0: UUIDS[0], 2: UUIDS[2]},
            {0: UUIDS[0], 2: UUIDS[2], 1: OTHER.uuid},
            [],
        ),
        ([OTHER], ROLLED_OUT, {0: OTHER.uuid}, []),  # another machine altogether
        ([], ROLLED_OUT, {}, []),
    ],
)
def test_numbers_stay(gpus, rolled_out, numbers, gone):
    settled, lost = settle(gpus, rolled_out)
    assert by_number(settled) == numbers
    assert [item.gpu for item in lost] == gone


@pytest.mark.parametrize("name", ["3", UUIDS[3], UUIDS[3][:12]])
def test_what_the_inventory_says_of_it_stays_right(name):
    wanted = [*(str(n) for n in range(8) if n != 3), name]
    gpus, gone = settle(listed(0, 1, 2, 4, 5, 6, 7), ROLLED_OUT)
    slots, findings = resolve("cuda", wanted, [{"gpu": name, "port": 31000}], 30000, "127.0.0.1", gpus, True, gone)
    assert [(slot.gpu, slot.port, slot.uuid) for slot in slots] == [
        (n, 30000 + n, UUIDS[n]) for n in (0, 1, 2, 4, 5, 6, 7)
    ]
    assert [(item.code, item.severity, item.gpu) for item in findings] == [("gpu_gone", "warning", 3)]
    assert f"GPU 3 ({UUIDS[3]}) had a server and is gone" in findings[0].message


def test_a_gpu_that_never_had_a_server_is_a_mistake_in_the_inventory():
    gpus, gone = settle(listed(0, 1, 2), dict(enumerate(UUIDS[:3])))
    _slots, findings = resolve("cuda", ["0", "1", "2", "3"], [], 30000, "127.0.0.1", gpus, True, gone)
    assert [(item.code, item.severity) for item in findings] == [("gpu_unknown", "error")]


def test_the_device_node_of_one_is_missing(tmp_path, runner):
    rolled_out(tmp_path, range(8))
    runner.on("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", stdout="")
    runner.on("nvidia-smi", stdout=smi())
    state = {f"{tmp_path}/dev/nvidia3": "2 No such file or directory"}
    runner.on_call(
        "-c", answer=lambda argv: Result(0, "".join(f"{path} {state.get(path, 'ok')}\n" for path in argv[3:]))
    )
    host = Host(runner, str(tmp_path), str(tmp_path / "dev"))
    seen = look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc"))
    assert [gpu.index for gpu in seen.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert seen.gone == [Gone(3, UUIDS[3], f"{tmp_path}/dev/nvidia3 does not exist")]
    # a node that only may not be opened is a mistake of the container: that stops the deploy, as before
    state[f"{tmp_path}/dev/nvidia3"] = "1 Operation not permitted"
    assert look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc")).gone == []
    assert broken_nodes(runner, EIGHT, {}) == {}


def fallen(tmp_path, runner, servers, lost=3, alone=True):
    """A host of eight on which nvidia-smi fails for all since one GPU fell off the bus."""
    for index, uuid in enumerate(UUIDS):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{index + 1:02x}:00.0"
        folder.mkdir(parents=True)
        known = "GPU-????????-????" if index == lost else uuid
        (folder / "information").write_text(f"GPU UUID: {known}\nDevice Minor: {index}\n")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{index}").touch()
    rolled_out(tmp_path, servers)
    dead = Result(15, f"Unable to determine the device handle for GPU0000:{lost + 1:02X}:00.0: Unknown Error\n")

    def answer(argv):
        only = next((word[5:].split(",") for word in argv if word.startswith("--id=")), [])
        if not only or not alone or f"0000:{lost + 1:02x}:00.0" in only:
            return dead
        rows = [row for row in smi().splitlines(True) if any(f"0000{bus}" in row.lower() for bus in only)]
        return Result(0, "".join(rows))

    runner.on_call("nvidia-smi", answer=answer)
    runner.on_call("-c", answer=lambda argv: Result(0, "".join(f"{path} ok\n" for path in argv[3:])))
    return Host(runner, str(tmp_path / "proc"), str(tmp_path / "dev"))


def test_one_that_fell_off_the_bus_does_not_hide_the_others(tmp_path, runner):
    host = fallen(tmp_path, runner, servers=range(8))
    seen = look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc"))
    assert [gpu.index for gpu in seen.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert (seen.known, seen.findings) == (True, [])
    assert [(item.gpu, item.uuid) for item in seen.gone] == [(3, UUIDS[3])]
    asked = runner.commands("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory")
    assert [UUIDS[3] in str(words) for words in asked] == [False]


@pytest.mark.parametrize(("wanted", "severity"), [([], "error"), (["0", "1"], "warning")])
def test_one_that_fell_off_before_it_had_a_server_is_a_problem(tmp_path, runner, wanted, severity):
    host = fallen(tmp_path, runner, servers=[])
    seen = look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc"), wanted=wanted)
    assert ([gpu.index for gpu in seen.gpus], seen.gone) == ([0, 1, 2, 4, 5, 6, 7], [])
    assert [(item.code, item.severity) for item in seen.findings] == [("gpu_lost", severity)]
    assert "the GPU at 0000:04:00.0 does not answer: nvidia-smi failed with rc 15" in seen.findings[0].message
    (tmp_path / "dev/nvidia3").unlink()  # not passed into this container
    assert look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc"), wanted=wanted).findings == []


def test_where_none_answers_alone_it_is_the_driver(tmp_path, runner):
    host = fallen(tmp_path, runner, servers=range(8), alone=False)
    seen = look_at_gpus(host, "cuda", config_dir=str(tmp_path / "etc"))
    assert (seen.gpus, seen.known, seen.gone) == ([], False, [])
    assert [item.code for item in seen.findings] == ["nvidia_smi_failed"]


def test_its_unit_stays_while_the_inventory_asks_for_it():
    gone = [Gone(3, UUIDS[3], "x")]

    class Applied:
        gpu, unit = 3, "sglang@3.service"

    class Plan:
        instances = ()

    assert removed_units(Plan, [Applied], [], gone) == []
    assert removed_units(Plan, [Applied], ["3"], gone) == []
    assert removed_units(Plan, [Applied], ["0", "1"], gone) == ["sglang@3.service"]
    assert missed(["0", "1"], gone) == []
