"""A container's configuration on Proxmox: only what is missing is added, and only to its own section."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpu_container_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _gpu_container_conf as conf

DEVICES = """Character devices:
  1 mem
 10 misc
195 nvidia
195 nvidiactl
195 nvidia-modeset
226 drm
508 nvidia-uvm
511 nvidia-caps

Block devices:
  8 sd
195 not-this-one
"""
OLD_DEVICES = "Character devices:\n  1 mem\n195 nvidia-frontend\n235 nvidia-uvm\n"
MAJORS = conf.parse_majors(DEVICES)
NODES = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
HEAD = """#GPU servers%0Asecond line of the notes
arch: amd64
cores: 32
dev0: /dev/dri/renderD128,gid=104
hostname: ct200
memory: 262144
rootfs: local-zfs:subvol-200-disk-0,size=500G
unprivileged: 1
"""
SNAP = """
[before]
arch: amd64
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
snaptime: 1700000000
"""
RULES = "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 508:* rwm\n"
MOUNTS = "".join(f"lxc.mount.entry: {node} {node[1:]} none bind,optional,create=file\n" for node in NODES)
DEVS = "dev1: /dev/nvidiactl,mode=0666\ndev2: /dev/nvidia-uvm,mode=0666\ndev3: /dev/nvidia0,mode=0666\n"


def test_majors():
    assert MAJORS["nvidia"] == 195
    assert "not-this-one" not in MAJORS
    found = {name: conf.major_of(f"/dev/{name}", MAJORS) for name in ("nvidia7", "nvidiactl", "nvidia-uvm-tools")}
    assert found == {"nvidia7": 195, "nvidiactl": 195, "nvidia-uvm-tools": 508}
    assert conf.major_of("/dev/nvidia-caps/nvidia-cap1", MAJORS) == 511
    old = conf.parse_majors(OLD_DEVICES)
    assert (conf.major_of("/dev/nvidia0", old), conf.major_of("/dev/nvidia-uvm", old)) == (195, 235)
    assert conf.major_of("/dev/nvidia0", {"mem": 1}) is None


@pytest.mark.parametrize("tail", ["", SNAP, "\n[a]\nx: y\n\n[vzdump]\nz: 1\n"])
@pytest.mark.parametrize(("style", "lines"), [("lxc", RULES + MOUNTS), ("dev", DEVS)])
def test_lines_go_behind_the_containers_own_and_a_second_time_changes_nothing(style, lines, tail):
    done = conf.complete(HEAD + tail, NODES, MAJORS, style)
    assert done.text == HEAD + lines + tail
    assert "".join(f"{line}\n" for line in done.added) == lines
    again = conf.complete(done.text, NODES, MAJORS, style)
    assert (again.text, again.added) == (done.text, [])


@pytest.mark.parametrize(
    ("there", "style", "added"),
    [
        (RULES + MOUNTS, "lxc", []),
        (RULES + MOUNTS, "dev", []),
        (DEVS, "lxc", []),
        (DEVS.replace("/dev/nvidia-uvm,", "path=/dev/nvidia-uvm,"), "lxc", []),
        ((RULES + MOUNTS).replace(": ", " = "), "lxc", []),
        ("lxc.cgroup2.devices.allow: a\n" + MOUNTS, "lxc", []),
        ("lxc.cgroup2.devices.allow: c *:* rwm\nlxc.mount.entry: /dev dev none bind 0 0\n", "lxc", []),
        (
            "lxc.cgroup2.devices.allow: c 195:* rw\nlxc.cgroup2.devices.allow: c 508:0 rwm\n" + MOUNTS,
            "lxc",
            [RULES[39:-1]],
        ),
        ("lxc.cgroup2.devices.allow: c *:* m\n" + MOUNTS, "lxc", RULES.splitlines()),
        (RULES + MOUNTS.replace("dev/nvidia0 none", "dev/other none"), "lxc", [MOUNTS.splitlines()[2]]),
        (
            "dev1: /dev/nvidiactl\n" + MOUNTS.splitlines()[1] + "\n" + MOUNTS.splitlines()[2] + "\n",
            "lxc",
            RULES.splitlines(),
        ),
    ],
)
def test_what_is_there_in_another_spelling_counts(there, style, added):
    done = conf.complete(HEAD + there + SNAP, NODES, MAJORS, style)
    assert done.added == added
    assert done.text.endswith(SNAP)
    assert done.text.startswith(HEAD + there)


def test_cgroup_v1_has_another_key_and_heeds_no_other():
    rules = RULES.replace("cgroup2", "cgroup")
    assert conf.complete(RULES + MOUNTS, NODES, MAJORS, v1=True).added == rules.splitlines()
    assert conf.complete(rules + MOUNTS, NODES, MAJORS, v1=True).added == []
    assert conf.complete(rules + MOUNTS, NODES, MAJORS).added == RULES.splitlines()


def test_a_rule_for_a_number_that_is_gone_is_named_and_stays():
    text = "lxc.cgroup2.devices.allow: c 235:* rwm\nlxc.cgroup2.devices.allow: c 226:* rwm"
    done = conf.complete(text, NODES, MAJORS)
    assert done.text == f"{text}\n{RULES}{MOUNTS}"
    assert len(done.notes) == 1
    assert "'c 235:* rwm'" in done.notes[0]


@pytest.fixture
def host(tmp_path):
    """A Proxmox host with one GPU and a container's configuration."""
    for folder in ("dev", "cgroup", "lxc"):
        (tmp_path / folder).mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia-modeset"):
        (tmp_path / "dev" / name).write_text("")
    (tmp_path / "cgroup/cgroup.controllers").write_text("cpu\n")
    (tmp_path / "devices").write_text(DEVICES)
    (tmp_path / "lxc/200.conf").write_text(HEAD + SNAP)
    (tmp_path / "lxc/200.conf").chmod(0o640)
    return apply.Spec(
        str(tmp_path / "lxc/200.conf"),
        backup_dir=str(tmp_path / "backup"),
        devices_file=str(tmp_path / "devices"),
        dev=str(tmp_path / "dev"),
        cgroup=str(tmp_path / "cgroup"),
    )


def changed(spec, **values):
    return apply.Spec(**{**vars(spec), **values})


def test_check_run_run_again(host):
    would = apply.ensure(host, check=True)
    assert Path(host.path).read_text() == HEAD + SNAP
    assert (would["changed"], would["backup"]) == (True, "")
    did = apply.ensure(host, check=False)
    assert {**did, "backup": ""} == would
    text = Path(host.path).read_text()
    assert text == did["diff"]["after"]
    assert text.endswith(SNAP)
    assert "lxc.mount.entry: /dev/nvidia-uvm-tools dev/nvidia-uvm-tools none bind,optional,create=file\n" in text
    assert "nvidia-modeset" not in text
    assert Path(did["backup"]).read_text() == HEAD + SNAP
    assert stat.S_IMODE(os.stat(host.path).st_mode) == 0o640
    assert os.listdir(os.path.dirname(host.path)) == ["200.conf"]
    assert apply.ensure(host, check=False)["changed"] is False
    assert len(os.listdir(host.backup_dir)) == 1


def test_only_some_gpus(host):
    added = apply.ensure(changed(host, gpus=[3, 5]), check=True)["added"]
    assert [line.split()[1] for line in added if "nvidia3" in line or "nvidia5" in line] == [
        "/dev/nvidia3",
        "/dev/nvidia5",
    ]
    assert not [line for line in added if "nvidia0" in line]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"path": "/nonexistent/200.conf"}, "is this the Proxmox host?"),
        ({"devices_file": "/dev/null"}, "'modprobe nvidia'; nvidia-uvm is not loaded"),
        ({"dev": "/nonexistent"}, "other GPU to pass in"),
        ({"style": "dev", "gpus": [0, 9]}, "/dev/nvidia9 not there"),
        ({"backup_dir": "/dev/null/x"}, "cannot be kept"),
    ],
)
def test_what_stands_in_the_way_is_said_and_nothing_changed(host, values, said):
    with pytest.raises(apply.ConfError, match=said.replace("?", r"\?")):
        apply.ensure(changed(host, **values), check=False)
    assert Path(host.path).read_text() == HEAD + SNAP


def test_a_locked_container_is_left_alone(host):
    Path(host.path).write_text(HEAD + "lock: backup\n" + SNAP)
    with pytest.raises(apply.ConfError, match=r"locked \(backup\)"):
        apply.ensure(host, check=True)
    Path(host.path).write_text(HEAD + SNAP + "lock: snapshot\n")  # a snapshot's own
    assert apply.ensure(host, check=True)["changed"] is True
