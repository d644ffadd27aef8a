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
    (tmp_path / "etc").mkdir()
    for gpu, uuid in enumerate(UUIDS):
        data = {"gpu": gpu, "unit": f"sglang@{gpu}.service", "host": "127.0.0.1", "port": 30000 + gpu, "uuid": uuid,
                "argv": [], "environment": {}, "environment_file": "", "unit_file": ""}  # fmt: skip
        (tmp_path / f"etc/{gpu}.json").write_text(json.dumps(data))
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
