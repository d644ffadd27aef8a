"""Rendering: quoting that systemd undoes, and a digest that changes with everything that matters."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.plugin_utils._render import (
    RenderError,
    environment_value,
    exec_start,
    render,
    server_files,
)

TEMPLATES = Path(__file__).parents[4] / "roles/sglang_server/templates"
VARIABLES = {
    "device": "cuda",
    "user": "sglang",
    "group": "sglang",
    "state_dir": "/var/lib/sglang",
    "cache_dir": "/var/cache/sglang",
    "config_dir": "/etc/sglang",
    "target": "sglang.target",
    "stop_timeout": 300,
    "restart_sec": 10,
    "start_limit_burst": 4,
    "longest_start": 1800,
    "limit_nofile": 1048576,
}
INSTANCE = {
    "gpu": 3,
    "uuid": "GPU-3",
    "unit": "sglang@3.service",
    "host": "127.0.0.1",
    "port": 30003,
    "argv": ["/opt/sglang/releases/a/bin/python", "-m", "sglang.launch_server", "--port", "30003"],
    "environment": {"CUDA_VISIBLE_DEVICES": "GPU-3", "HOME": "/var/lib/sglang"},
    "environment_file": "/etc/sglang/3.env",
    "unit_file": "/etc/systemd/system/sglang@3.service",
    "canary": False,
    "served_model_name": "",
}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/bin/a", "-m", "x.y", "--port=1"], "/bin/a -m x.y --port=1"),
        (["/bin/a", "100%"], "/bin/a 100%%"),
        (["/bin/a", "$HOME"], '/bin/a "$$HOME"'),
        (["/bin/a", '{"a": "b c"}'], '/bin/a "{\\"a\\": \\"b c\\"}"'),
        (["/bin/a", "back\\slash"], '/bin/a "back\\\\slash"'),
        (["/bin/a", ";"], '/bin/a ";"'),
        (["/bin/a", ""], '/bin/a ""'),
        (["/bin/a", "it's"], '/bin/a "it\'s"'),
        (["/bin/a", 0.85, 64], "/bin/a 0.85 64"),
    ],
)
def test_exec_start(argv, line):
    assert exec_start(argv) == line


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("plain", '"plain"'),
        ("a b", '"a b"'),
        ('say "x"', '"say \\"x\\""'),
        ("$HOME", '"\\$HOME"'),
        ("`id`", '"\\`id\\`"'),
        (5, '"5"'),
    ],
)
def test_environment_value(value, quoted):
    assert environment_value(value) == quoted


def files(instance=None, variables=None, secrets=None):
    return server_files(
        instance or INSTANCE,
        str(TEMPLATES / "sglang@.service.j2"),
        str(TEMPLATES / "sglang.env.j2"),
        variables or VARIABLES,
        secrets or {},
    )


def unit_of(rendered):
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string(next(f["content"] for f in rendered if f["path"].endswith(".service")))
    return parser


def test_files_of_a_server():
    rendered, secret, digest = files()
    assert {(f["path"], f["mode"]) for f in rendered} == {
        ("/etc/sglang/3.env", "0600"),
        ("/etc/sglang/3.json", "0600"),
        ("/etc/systemd/system/sglang@3.service", "0644"),
    }
    assert secret == ""
    environment = next(f["content"] for f in rendered if f["path"].endswith(".env"))
    assert environment.splitlines()[-1] == f"GPUFLEET_CONFIG={digest}"
    assert 'CUDA_VISIBLE_DEVICES="GPU-3"' in environment.splitlines()


def test_unit_of_a_server():
    unit = unit_of(files()[0])
    service = unit["Service"]
    assert service["ExecStart"] == " ".join(INSTANCE["argv"])
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2 3"
    # four starts of half an hour and the pauses between them must fall into one window
    assert int(unit["Unit"]["StartLimitIntervalSec"]) >= 4 * (1800 + 10)
    assert "LD_LIBRARY_PATH" not in str(dict(service))


def test_a_cpu_slot_gets_no_gpu_device():
    text = next(
        f["content"] for f in files(variables={**VARIABLES, "device": "cpu"})[0] if f["path"].endswith(".service")
    )
    assert "char-nvidia" not in text
    assert "slot 3" in text


def test_secrets_stay_in_their_own_file():
    rendered, secret, _digest = files(secrets={"HF_TOKEN": "hf_verysecret"})
    assert secret == 'HF_TOKEN="hf_verysecret"\n'
    assert "hf_verysecret" not in str(rendered)
    assert "EnvironmentFile=/etc/sglang/3.secrets" in str(rendered)


@pytest.mark.parametrize(
    "other",
    [
        {"instance": {**INSTANCE, "argv": [*INSTANCE["argv"], "--metrics"]}},
        {"instance": {**INSTANCE, "environment": {"HOME": "/elsewhere"}}},
        {"variables": {**VARIABLES, "stop_timeout": 301}},
        {"secrets": {"HF_TOKEN": "another"}},
    ],
)
def test_the_digest_changes_with_everything_that_matters(other):
    assert files()[2] == files()[2]
    assert files(**other)[2] != files()[2]


def test_an_undefined_variable_is_an_error(tmp_path):
    template = tmp_path / "t.j2"
    template.write_text("{{ nothing }}")
    with pytest.raises(RenderError, match=r"t\.j2.*nothing"):
        render(str(template), {})
