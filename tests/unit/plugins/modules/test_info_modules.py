"""The modules that only look."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpufleet.sglang.plugins.modules import cuda_toolkit_info, sglang_host_info


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


def test_toolkit_info(capsys):
    result = call(cuda_toolkit_info, capsys, python=sys.executable)
    assert result["changed"] is False
    assert result["record"]["schema"] == 1
    assert result["cuda_home"] == result["record"]["cuda_home"]
    missing = call(cuda_toolkit_info, capsys, python="/nonexistent/bin/python")
    assert [item["code"] for item in missing["findings"]] == ["venv_missing"]
