"""The modules that only look."""

from __future__ import annotations

import json
import socket

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpufleet.sglang.plugins.modules import sglang_host_info


def call(module, capsys, **args):
    with patch_module_args(args), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_host_info_never_fails_on_a_problem(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        paths = [{"path": str(tmp_path / "x"), "min_free_mib": 1 << 40}]
        result = call(sglang_host_info, capsys, device="cpu", gpus=[0], base_port=port, paths=paths)
    assert "failed" not in result
    assert (result["changed"], result["ok"]) == (False, False)
    assert {"port_taken", "disk_full"} <= {item["code"] for item in result["problems"]}
    assert f"port {port} of GPU 0" in result["msg"]
    assert result["facts"]["cpu_count"] > 0
    assert result["facts"]["gpus_checked"] is False
