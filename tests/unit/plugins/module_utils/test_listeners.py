# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import os
import socket

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._listeners import (
    Listener,
    answering,
    command_of,
    listeners,
    parse_table,
)

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 00000000:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0
   2: 0100007F:7530 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0
"""
TCP6 = """\
  sl local_address remote_address st tx rx tr tm retrnsmt uid timeout inode
   0: 00000000000000000000000001000000:7532 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 4714 1 0
"""


def test_parse_table():
    assert parse_table(TCP) == [Listener("127.0.0.1", 30000, 4711), Listener("0.0.0.0", 30001, 4712)]


def test_parse_table_ipv6_needs_ten_fields():
    assert parse_table(TCP6.replace("0A 0:0 0:0 0 0 0 4714", "0A 0:0 00:0 0 0 0 4714")) == [
        Listener("::1", 30002, 4714)
    ]


def test_real_socket_is_ours():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = listeners(ports={port})
        assert (found.address, found.pids) == ("127.0.0.1", (os.getpid(),))
        (unheld,) = listeners(ports={port}, pids=[1])
        assert os.getpid() not in unheld.pids
    assert listeners(ports={port}) == []


@pytest.mark.parametrize(
    ("host", "port", "inode"),
    [
        ("127.0.0.1", 1, 11),  # the exact address before the wildcard
        ("127.0.0.2", 1, 12),
        ("10.0.0.1", 2, 13),  # dual-stack wildcard
        ("10.0.0.1", 3, None),  # someone else's address is not in our way
        ("localhost", 1, 11),
        ("::1", 4, 15),
        ("127.0.0.1", 5, 16),  # IPv4-mapped
        ("some-name", 3, 14),
    ],
)
def test_answering(host, port, inode):
    sockets = [
        Listener("0.0.0.0", 1, 12),
        Listener("127.0.0.1", 1, 11),
        Listener("::", 2, 13),
        Listener("192.0.2.1", 3, 14),
        Listener("::1", 4, 15),
        Listener("::ffff:127.0.0.1", 5, 16),
    ]
    found = answering(sockets, host, port)
    assert (found.inode if found else None) == inode


def test_command_of():
    assert "python" in command_of(os.getpid(), limit=1000)
    assert command_of(os.getpid(), limit=10).endswith("...")
    assert command_of(2**22 + 1) == ""


def test_command_of_shows_no_key(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"/v/bin/sglang\0serve\0--api-key\0secret\0")
    assert command_of(7, str(tmp_path)) == "/v/bin/sglang serve"
    (tmp_path / "7" / "cmdline").write_bytes(b"")
    (tmp_path / "7" / "comm").write_text("kthread\n")
    assert command_of(7, str(tmp_path)) == "[kthread]"
