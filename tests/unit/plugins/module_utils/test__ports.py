"""Who listens where: the kernel's tables, and real sockets."""

from __future__ import annotations

import os
import socket

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _ports
from ansible_collections.gpufleet.sglang.plugins.module_utils._ports import Listener
from hosts import TCP_HEADER, tcp_line


@pytest.mark.parametrize(
    ("address", "host", "meets"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("::", "10.0.0.1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("::1", "::1", True),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("::1", "0.0.0.0", False),
        ("127.0.0.1", "::", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "", True),
    ],
)
def test_clashes(address, host, meets):
    assert _ports.clashes(address, host) is meets


@pytest.mark.parametrize(
    ("family", "bind", "host"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)
def test_a_real_socket_is_found_with_its_process(family, bind, host):
    try:
        server = socket.socket(family)
        server.bind((bind, 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        server.listen()
        port = server.getsockname()[1]
        (holder,) = _ports.holders(_ports.listeners(), host, port)
    assert holder.pid == os.getpid()
    assert "python" in holder.command or "pytest" in holder.command
    assert _ports.holders(_ports.listeners(), host, port) == []


def test_owner_by_inode(tmp_path):
    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(TCP_HEADER + tcp_line("0100007F", 30000, 11) + tcp_line("0100007F", 30001, 12))
    folder = tmp_path / "812"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd/3").symlink_to("socket:[11]")
    (folder / "fd/4").symlink_to("/dev/null")
    (folder / "cmdline").write_bytes(b"/v/bin/python\0-m\0sglang.launch_server\0--api-key\0hush\0")
    (folder / "cgroup").write_text("0::/system.slice/system-sglang.slice/sglang@0.service\n")
    first, second = _ports.listeners(str(tmp_path))
    assert first == Listener("127.0.0.1", 30000, 812, "/v/bin/python -m sglang.launch_server", "sglang@0.service")
    assert second == Listener("127.0.0.1", 30001)
    assert _ports.describe(first) == "pid 812 (/v/bin/python -m sglang.launch_server, sglang@0.service) on 127.0.0.1"
    assert "may not see" in _ports.describe(second)


def test_a_kernel_thread_has_a_name_but_no_command_line(tmp_path):
    (tmp_path / "9").mkdir()
    (tmp_path / "9/cmdline").write_bytes(b"")
    (tmp_path / "9/comm").write_text("kworker/0:1\n")
    assert _ports.program_of(9, str(tmp_path)) == "kworker/0:1"
    assert _ports.program_of(10, str(tmp_path)) is None
