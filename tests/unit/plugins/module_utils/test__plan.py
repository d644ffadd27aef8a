"""The plan: the reference deployment on three engines, and everything a plan refuses."""

from __future__ import annotations

import dataclasses

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _plan
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._gone import settle
from ansible_collections.gpufleet.sglang.plugins.module_utils._gpus import parse_gpus
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import plan_from_dict
from ansible_collections.gpufleet.sglang.plugins.module_utils._plan import PlanFacts, PlanSettings
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener
from engines import engine
from hosts import UUIDS, smi

MODEL = "/srv/models/Qwen3.6-27B"
WHOLE = {
    "path": MODEL, "kind": "folder", "state": "folder", "config": "ok", "mistral_config": False, "tokenizer": True,
    "weights": 12, "pointers": [], "unreadable": [], "missing_shards": [],
}  # fmt: skip
HUB = {"path": "Qwen/Q", "kind": "hub"}
CT200 = PlanSettings(
    name="ct200",
    model=MODEL,
    venv="/opt/sglang/releases/r1",
    release="r1",
    gpus=[str(index) for index in range(8)],
    settings={
        "attention_backend": "flashinfer",
        "mem_fraction_static": 0.85,
        "max_running_requests": 64,
        "chunked_prefill_size": 4096,
        "mamba_strategy": "no_buffer",
        "reasoning_parser": "qwen3",
        "metrics": True,
        "sampling_backend": None,
    },
)
FACTS = PlanFacts(gpus=parse_gpus(smi()), model=WHOLE)


def settings(**changes):
    return dataclasses.replace(CT200, **changes)


def facts(**changes):
    return dataclasses.replace(FACTS, **changes)


def build(wanted=CT200, seen=FACTS, version="0.5.23"):
    return _plan.build_plan(wanted, seen, engine(version) if version else None)


@pytest.mark.parametrize(
    ("version", "mamba"),
    [
        ("0.5.12", "--mamba-scheduler-strategy"),
        ("0.5.16", "--mamba-radix-cache-strategy"),
        ("0.5.23", "--mamba-radix-cache-strategy"),
        (None, "--mamba-radix-cache-strategy"),
    ],
)
def test_ct200(version, mamba):
    plan, problems, warnings = build(version=version)
    assert problems == []
    assert [item.code for item in warnings] == ([] if version else ["flags_unchecked"])
    assert [item.unit for item in plan.instances] == [f"sglang@{index}.service" for index in range(8)]
    assert [item.port for item in plan.instances] == list(range(30000, 30008))
    assert [item.canary for item in plan.instances] == [True] + 7 * [False]
    assert plan.release.version == (version or "")
    for index, item in enumerate(plan.instances):
        assert item.argv == [
            "/opt/sglang/releases/r1/bin/python", "-m", "sglang.launch_server",
            "--model-path", MODEL, "--host", "127.0.0.1", "--port", str(30000 + index),
            "--mem-fraction-static", "0.85", "--max-running-requests", "64", "--chunked-prefill-size", "4096",
            "--attention-backend", "flashinfer", mamba, "no_buffer", "--reasoning-parser", "qwen3", "--enable-metrics",
            "--disable-overlap-schedule",
        ]  # fmt: skip
        assert item.uuid == item.environment["CUDA_VISIBLE_DEVICES"] == UUIDS[index]
        assert item.environment_file == f"/etc/sglang/{index}.env"
        assert item.unit_file == f"/etc/systemd/system/sglang@{index}.service"


def test_a_port_of_ones_own_for_torchs_store_is_left_alone():
    asked = settings(instances=[{"gpu": 2, "extra_args": {"nccl-port": 29500}}])
    plan, problems, _notes = build(asked)
    assert problems == []
    with_file = [item.gpu for item in plan.instances if "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" in item.environment]
    assert with_file == [0, 1, 3, 4, 5, 6, 7]


def test_environment_of_a_cuda_server():
    plan, _problems, _warnings = build(seen=facts(cuda_home="/var/lib/sglang/cuda"))
    assert plan.instances[2].environment == {
        "HOME": "/var/lib/sglang",
        "PATH": "/opt/sglang/releases/r1/bin:/var/lib/sglang/cuda/bin:"
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "VIRTUAL_ENV": "/opt/sglang/releases/r1",
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": "/var/lib/sglang/huggingface",
        "XDG_CACHE_HOME": "/var/cache/sglang/xdg",
        "SGLANG_CACHE_DIR": "/var/cache/sglang",
        "SGLANG_JIT_CACHE_DIR": "/var/cache/sglang/jit",
        "FLASHINFER_WORKSPACE_BASE": "/var/cache/sglang",
        "TRITON_CACHE_DIR": "/var/cache/sglang/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/var/cache/sglang/inductor",
        "TILELANG_CACHE_DIR": "/var/cache/sglang/tilelang",
        "TVM_FFI_CACHE_DIR": "/var/cache/sglang/tvm-ffi",
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "file:///tmp/torch-store",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
        "CUDA_CACHE_PATH": "/var/cache/sglang/nv",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": UUIDS[2],
        "CUDA_HOME": "/var/lib/sglang/cuda",
        "HF_HUB_OFFLINE": "1",
    }


def test_published_kernels_are_served_without_a_compiler():
    wanted = settings(kernels_dir="/opt/sglang/kernels/r1", environment={"PYTHONPATH": "/own"})
    found = build(wanted)[0].instances[0].environment
    assert found["PYTHONPATH"] == "/opt/sglang/kernels/r1:/own"
    assert (found["FLASHINFER_DISABLE_JIT"], found["SGLANG_CRASH_ON_JIT_COMPILE"]) == ("1", "1")
    assert found["FLASHINFER_WORKSPACE_BASE"] == "/var/lib/sglang/flashinfer"  # its log; the cache may be read-only
    assert "FLASHINFER_DISABLE_JIT" not in build()[0].instances[0].environment


def test_device_cpu():
    wanted = settings(device="cpu", gpus=["0", "2"], settings={"sleep_on_idle": True})
    plan, problems, _warnings = build(wanted, facts(gpus=[], cuda_home="/cuda"))
    assert problems == []
    assert [(item.gpu, item.uuid, item.port) for item in plan.instances] == [(0, None, 30000), (2, None, 30002)]
    assert plan.instances[0].argv[3:] == [
        "--model-path", MODEL, "--host", "127.0.0.1", "--port", "30000", "--device", "cpu", "--sleep-on-idle",
    ]  # fmt: skip
    environment = plan.instances[0].environment
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_DEVICE_ORDER"} & set(environment)


def test_equal_input_gives_equal_bytes():
    one, _problems, _warnings = build(settings(extra_args={"page-size": 1, "disable-radix-cache": True}))
    two, _problems, _warnings = build(settings(extra_args={"disable-radix-cache": True, "page-size": 1}))
    assert one.to_json() == two.to_json()
    assert plan_from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("gpus", "expected", "canary"),
    [
        ([], list(range(8)), 0),
        (["3", "1"], [1, 3], 3),
        ([UUIDS[5], "2"], [2, 5], 5),
        ([UUIDS[5][:12]], [5], 5),
        ([2], [2], 2),
    ],
)
def test_gpus_by_index_and_uuid(gpus, expected, canary):
    plan, problems, _warnings = build(settings(gpus=gpus))
    assert problems == []
    assert [item.gpu for item in plan.instances] == expected
    assert [item.gpu for item in plan.instances if item.canary] == [canary]


def test_canary_by_uuid():
    plan, problems, _warnings = build(settings(canary=UUIDS[6]))
    assert problems == []
    assert [item.gpu for item in plan.instances if item.canary] == [6]


@pytest.mark.parametrize("canary", ["", "6", UUIDS[6]])
def test_without_a_gpu_that_is_gone_the_others_are_planned_as_before(canary):
    """The driver lists seven and counts them from 0; the canary's own GPU may be the one that is missing."""
    before, _problems, _warnings = build(settings(canary=canary))
    listed = [gpu for gpu in parse_gpus(smi()) if gpu.index != 6]
    listed = [dataclasses.replace(gpu, index=number) for number, gpu in enumerate(listed)]
    gpus, gone = settle(listed, dict(enumerate(UUIDS)))
    plan, problems, warnings = build(settings(canary=canary), facts(gpus=gpus, gone=gone))
    assert (problems, [item.code for item in warnings]) == ([], ["gpu_gone"])
    expected = [dataclasses.replace(item, canary=item.gpu == 0) for item in before.instances if item.gpu != 6]
    assert plan.instances == expected


def test_a_gpu_in_mig_mode_or_without_uuid_is_given_by_index():
    plan, problems, warnings = build(seen=facts(gpus=parse_gpus(smi(mig="Enabled"))))
    assert problems == []
    assert plan.instances[3].environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert {item.code for item in warnings} == {"gpu_mig"}


def test_overrides_of_one_gpu():
    wanted = settings(
        environment={"A": "1", "B": 2},
        extra_args={"page-size": 1, "disable-radix-cache": True},
        instances=[
            {
                "gpu": UUIDS[3],
                "port": 31000,
                "host": "0.0.0.0",
                "mem_fraction_static": 0.7,
                "metrics": False,
                "served_model_name": "three",
                "environment": {"A": None, "C": True, "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "true"},
                "extra_args": {"page-size": 16, "disable-radix-cache": None},
            }
        ],
    )
    plan, problems, _warnings = build(wanted)
    assert problems == []
    other, three = plan.instances[2], plan.instances[3]
    assert (three.port, three.host, three.probe_host, three.served_model_name) == (
        31000,
        "0.0.0.0",
        "127.0.0.1",
        "three",
    )
    assert three.argv[-3:] == ["--page-size", "16", "--disable-overlap-schedule"]
    assert "--enable-metrics" not in three.argv
    assert "--disable-radix-cache" not in three.argv
    assert three.argv[three.argv.index("--mem-fraction-static") + 1] == "0.7"
    assert three.argv[5:7] == ["--served-model-name", "three"]
    assert "A" not in three.environment
    assert (three.environment["B"], three.environment["C"]) == ("2", "true")
    assert three.environment["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] == "true"
    assert other.argv[-3:] == ["--disable-radix-cache", "--page-size", "1"]
    assert other.environment["A"] == "1"


def held(port, unit, address="127.0.0.1"):
    return facts(listeners=[Listener(address, port, 812, "nginx", unit)])


@pytest.mark.parametrize(
    ("wanted", "seen", "code", "text"),
    [
        ({"gpus": ["9"]}, FACTS, "gpu_unknown", "names 9, which is not a GPU of this host"),
        ({"gpus": ["GPU-ffffffff"]}, FACTS, "gpu_unknown", "GPU-ffffffff"),
        ({"gpus": ["MIG-1"]}, FACTS, "gpu_unknown", "MIG-1"),
        ({"gpus": ["1", UUIDS[1]]}, FACTS, "gpu_twice", f"as 1 and as {UUIDS[1]}"),
        ({"gpus": []}, facts(gpus=[]), "no_gpu", "no GPU"),
        ({"device": "cpu", "gpus": []}, FACTS, "no_slots", "sglang_server_gpus"),
        ({"device": "cpu", "gpus": ["GPU-x"]}, FACTS, "gpu_unknown", "number from 0"),
        ({"device": "cpu", "gpus": ["0", "0"]}, FACTS, "gpu_twice", "twice"),
        ({"canary": "9"}, FACTS, "canary_unknown", "names 9"),
        ({"instances": [{"gpu": 1, "port": 30000}]}, FACTS, "port_twice", "GPU 0 and GPU 1"),
        ({"instances": [{"gpu": 1, "port": 80}]}, FACTS, "port_range", "port 80 of GPU 1"),
        ({"instances": [{"gpu": 1, "port": "x"}]}, FACTS, "bad_port", "GPU 1"),
        ({"base_port": 65530}, FACTS, "port_range", "port 65536"),
        ({"base_port": "x"}, FACTS, "bad_port", "sglang_server_base_port"),
        ({"instances": [{"gpu": 9}]}, FACTS, "instance_unknown_gpu", "GPU 9"),
        ({"instances": [{"gpu": 1}, {"gpu": UUIDS[1]}]}, FACTS, "instance_twice", "GPU 1 again"),
        ({"instances": [{"port": 1}]}, FACTS, "instance_without_gpu", "[0]"),
        ({"instances": [{"gpu": 1, "mem_fraction_statik": 0.5}]}, FACTS, "unknown_setting", "mem_fraction_static"),
        ({"instances": [{"gpu": 1, "extra_args": "x"}]}, FACTS, "bad_value", "dictionary"),
        ({"instances": [{"gpu": 1, "mem_fraction_static": 2}]}, FACTS, "bad_value", "GPU 1"),
        ({}, held(30003, "nginx.service"), "port_taken", "of GPU 3 is taken by pid 812 (nginx, nginx.service)"),
        ({}, held(30003, None, "::"), "port_taken", "no unit"),
        ({}, held(30003, "sglang@4.service"), "port_taken", "sglang@4.service"),
        ({"settings": {"mem_fraction_static": 85}}, FACTS, "bad_value", "between 0 and 1"),
        ({"settings": {"nonsense": 1}}, FACTS, "unknown_setting", "nonsense"),
        ({"settings": {"attention_backend": "fa33"}}, FACTS, "bad_value", "fa3"),
        ({"extra_args": {"nccl-port": 28000}}, FACTS, "flag_shared", "only one would start"),
        ({"extra_args": {"tp-size": 2}}, FACTS, "owned_flag", "one server per GPU"),
        ({"environment": {"1X": "a"}}, FACTS, "env_name", "1X"),
        ({"environment": {"X": "a\nb"}}, FACTS, "env_value", "one line"),
        ({"environment": {"X": ["a"]}}, FACTS, "env_value", "text"),
        ({"environment": {"LD_LIBRARY_PATH": "/x"}}, FACTS, "env_library_path", "torch"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, FACTS, "env_reserved", "sglang_server_gpus"),
        ({"environment": {"HF_TOKEN": "x"}}, FACTS, "env_secret", "sglang_server_secret_environment"),
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "x"}}, FACTS, "env_secret", "AWS_SECRET_ACCESS_KEY"),
        ({"environment": {"DB_PASSWORD": "x"}}, FACTS, "env_secret", "DB_PASSWORD"),
        ({"model": ""}, FACTS, "model_missing", "empty"),
        ({"model": "./m"}, facts(model={"path": "./m", "kind": "relative"}), "model_relative", "whole path"),
        ({}, facts(model={"path": MODEL, "kind": "folder", "state": "missing"}), "model_missing", MODEL),
        ({"state_dir": "var/lib"}, FACTS, "bad_path", "state_dir"),
        ({"venv": "/a b"}, FACTS, "bad_path", "venv"),
        ({"host": ""}, FACTS, "bad_value", "sglang_server_host"),
        ({}, facts(findings=[Finding("nvidia_smi_hung", "hung")]), "nvidia_smi_hung", "hung"),
    ],
)  # fmt: skip
def test_refused(wanted, seen, code, text):
    _result, problems, _warnings = build(settings(**wanted), seen)
    assert [item.code for item in problems] == [code]
    assert text in problems[0].text()


def test_all_problems_at_once():
    wanted = settings(
        gpus=["0", "9", "0"],
        settings={"mem_fraction_static": 2, "attention_backend": "no"},
        extra_args={"api-key": "k", "nope": 1},
        environment={"HF_TOKEN": "t"},
        canary="7",
    )
    _result, problems, _warnings = build(wanted, held(30000, "x.service"))
    assert sorted(item.code for item in problems) == [
        "bad_value", "bad_value", "canary_unknown", "env_secret", "gpu_twice", "gpu_unknown", "owned_flag",
        "port_taken", "unknown_flag",
    ]  # fmt: skip


def test_a_fleets_mistake_is_not_repeated_for_every_gpu_with_overrides():
    wanted = settings(
        extra_args={"nope": 1}, instances=[{"gpu": 1, "dtype": "half"}, {"gpu": 2, "extra_args": {"nope": 2}}]
    )
    _result, problems, _warnings = build(wanted)
    assert [item.code for item in problems] == ["unknown_flag"]


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "SGLANG_MAX_TOKENS", "KEYBOARD", "MONKEY", "X_KEYS"])
def test_names_that_only_look_like_secrets(name):
    _result, problems, _warnings = build(settings(environment={name: "1"}))
    assert problems == []


def test_our_own_server_on_the_port_is_no_conflict():
    _result, problems, _warnings = build(seen=held(30003, "sglang@3.service"))
    assert problems == []
    _result, problems, _warnings = build(seen=held(30003, "nginx.service", "10.0.0.1"))
    assert problems == []


@pytest.mark.parametrize(
    ("wanted", "seen", "code"),
    [
        ({"base_port": 29000}, FACTS, "port_torch_range"),
        ({"model": "Qwen/Q", "environment": {"HF_HUB_OFFLINE": "1"}}, facts(model=HUB), "model_offline"),
        ({}, facts(model={**WHOLE, "tokenizer": False}), "model_tokenizer"),
        ({}, facts(findings=[Finding("toolkit_file", "unreadable", severity=WARNING)]), "toolkit_file"),
    ],
)  # fmt: skip
def test_warnings(wanted, seen, code):
    _result, problems, warnings = build(settings(**wanted), seen)
    assert (problems, [item.code for item in warnings]) == ([], [code])


def test_when_nvidia_smi_did_not_answer_only_that_is_said():
    seen = facts(gpus=[], gpus_known=False, findings=[Finding("nvidia_smi_hung", "hung")])
    plan, problems, _warnings = build(seen=seen)
    assert [item.code for item in problems] == ["nvidia_smi_hung"]
    assert plan.instances == []


def test_a_hub_id_is_not_offline():
    plan, problems, warnings = build(settings(model="Qwen/Q"), facts(model=HUB))
    assert (problems, warnings) == ([], [])
    assert "HF_HUB_OFFLINE" not in plan.instances[0].environment


def test_the_launcher_follows_the_engine():
    options = dataclasses.replace(engine("0.5.23"), launch_server=False, serve=True)
    plan, _problems, _warnings = _plan.build_plan(CT200, FACTS, options)
    assert plan.instances[0].argv[:3] == ["/opt/sglang/releases/r1/bin/sglang", "serve", "--model-path"]


def test_units_that_are_no_longer_planned():
    plan, _problems, _warnings = build(settings(gpus=["0", "1"]))
    rendered = [dataclasses.replace(plan.instances[0], gpu=gpu, unit=f"sglang@{gpu}.service") for gpu in (10, 0, 2)]
    assert _plan.removed_units(plan, rendered) == ["sglang@2.service", "sglang@10.service"]


def test_lines_for_people():
    plan, _problems, _warnings = build(settings(gpus=["0"]))
    (line,) = _plan.describe(plan, FACTS.gpus)
    assert line == f"GPU 0 ({FACTS.gpus[0].name}, {UUIDS[0]}): sglang@0.service on 127.0.0.1:30000, canary"
