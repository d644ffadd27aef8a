"""What pct, sudo and ssh say, and what becomes of it; a real container is tests/deploy/test_ct200.py."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.playbook.play_context import PlayContext
from ansible_collections.gpufleet.sglang.plugins.connection import pct

MINE = {"vmid": 200, "remote_user": "root", "remote_addr": "pve", "proxmox_become_method": "sudo"}


class Ssh:
    """The inner plugin: gives or raises what it was told to."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    def exec_command(self, cmd, in_data=None, sudoable=True):
        self.calls.append((cmd, in_data))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def connect(monkeypatch):
    def make(*answers, **options):
        monkeypatch.setattr(pct.Connection, "get_option", lambda self, name: {**MINE, **options}[name])
        connection = pct.Connection(PlayContext())
        connection.ssh_type_conn = Ssh(*answers)
        return connection

    return make


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "/usr/sbin/pct exec 200 -- /bin/sh -c 'id; x > y'"),
        ({"vmid": 7}, "/usr/sbin/pct exec 7 -- /bin/sh -c 'id; x > y'"),
        ({"remote_user": "fred"}, "sudo -n /usr/sbin/pct exec 200 -- /bin/sh -c 'id; x > y'"),
        (
            {"remote_user": "fred", "proxmox_become_method": "doas"},
            "doas -n /usr/sbin/pct exec 200 -- /bin/sh -c 'id; x > y'",
        ),
    ],
)
def test_the_line_on_the_proxmox_host(connect, options, line):
    connection = connect((0, b"out", b"err"), **options)
    assert connection.exec_command("id; x > y", in_data=b"module") == (0, b"out", b"err")
    assert connection.ssh_type_conn.calls == [(line, b"module")]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (AnsibleConnectionFailure("x: container '200' not running!"), "container 200 does not run: `pct start 200`"),
        (
            AnsibleConnectionFailure("x: Configuration file 'nodes/pve/lxc/200.conf' does not exist"),
            "has no container 200: see `pct list`",
        ),
        ((127, b"", b"bash: line 1: /usr/sbin/pct: No such file or directory\n"), "must be the Proxmox host"),
        ((127, b"sh: 1: /usr/sbin/pct: not found\r\n", b""), "must be the Proxmox host"),
        (AnsibleConnectionFailure("Failed to connect: no route"), "Failed to connect: no route"),
    ],
)
def test_failures_are_explained_and_make_the_host_unreachable(connect, answer, said):
    with pytest.raises(AnsibleConnectionFailure) as caught:
        connect(answer).exec_command("true")
    assert str(caught.value).startswith("Proxmox host pve: ") and said in str(caught.value)


def test_a_refused_sudo(connect):
    with pytest.raises(AnsibleConnectionFailure, match="pve: fred may not run /usr/sbin/pct as root there"):
        connect((1, b"", b"sudo: a password is required\n"), remote_user="fred").exec_command("true")


@pytest.mark.parametrize(
    "answer",
    [
        (1, b"", b"sudo: a password is required\n"),  # root needs no sudo on the Proxmox host
        (0, b"container '200' not running", b"sudo: hello\n"),
        (2, b"", b"sudo: hello\n"),
        (1, b"\xff\xfe", b"\xff"),
        (1, b"x" * 9999 + b"\nsudo: late", b""),
    ],
)
def test_what_the_container_says_is_its_own(connect, answer):
    assert connect(answer).exec_command("true") == answer


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [([0], 1), ([5], 1), ([16, 0], 2), ([16, 16, 1], 3)],
)
def test_files_are_fetched_in_pieces(connect, tmp_path, monkeypatch, sizes, calls):
    monkeypatch.setattr(pct, "MEGABYTE", 1)
    pieces = [bytes([65 + at]) * size for at, size in enumerate(sizes)]
    connection = connect(*[(0, piece, b"") for piece in pieces])
    connection.fetch_file("/a b", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"".join(pieces)
    assert len(connection.ssh_type_conn.calls) == calls
    assert f"skip={16 * (calls - 1)} " in connection.ssh_type_conn.calls[-1][0]


@pytest.mark.parametrize(("content", "word"), [(b"x", "cat > "), (b"", ": > ")])
def test_files_are_written(connect, tmp_path, content, word):
    (tmp_path / "in").write_bytes(content)
    connection = connect((0, b"", b""))
    connection.put_file(str(tmp_path / "in"), "/a b")
    ((line, data),) = connection.ssh_type_conn.calls
    assert word in line and "/a b" in line and data == (content or None)


def test_a_file_that_cannot_be_written(connect, tmp_path):
    (tmp_path / "in").touch()
    with pytest.raises(AnsibleError, match="container 200: writing /x: no space left"):
        connect((1, b"", b"no space left\n")).put_file(str(tmp_path / "in"), "/x")
