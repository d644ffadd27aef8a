"""A release's inputs, its folder's states and the installer's choice, as tables."""

from __future__ import annotations

import json

import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils import _release_install as inst
from ansible_collections.gpufleet.sglang.plugins.module_utils._install_errors import causes, explain
from ansible_collections.gpufleet.sglang.plugins.module_utils._python_probe import Interpreter, find_interpreters
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import (
    PART,
    RECORD,
    Record,
    ReleaseError,
    Spec,
    check_spec,
    fingerprint_of,
    inputs_of,
    look,
    refusal,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Result

LOCK = "sglang==0.5.23\ntorch==2.14.1\n"


@pytest.mark.parametrize(
    ("values", "name", "folder"),
    [
        ({"version": "0.5.23"}, "0.5.23", "/opt/sglang/releases/0.5.23"),
        ({"version": "0.5.23", "name": "r2"}, "r2", "/opt/sglang/releases/r2"),
        ({"version": "0.5.23", "lock": LOCK}, "0.5.23", "/opt/sglang/releases/0.5.23"),
        ({"venv": "/srv/mine/"}, "mine", "/srv/mine"),
        ({"venv": "/srv/mine", "name": "x", "lock": LOCK, "requirements": ("a",)}, "x", "/srv/mine"),
        (
            {"version": "0.5.23", "lock": LOCK.replace("0.5.23", "0.5.23+standin")},
            "0.5.23",
            "/opt/sglang/releases/0.5.23",
        ),
    ],
)
def test_good_specs(values, name, folder):
    spec = Spec(**values)
    check_spec(spec)
    assert (spec.release_name, spec.folder, spec.log_path) == (name, folder, folder + ".log")


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({}, ["one of version, lock or venv is needed"]),
        ({"lock": LOCK}, ["name is needed"]),
        ({"name": "../x", "version": "1"}, ["name '../x'"]),
        ({"name": ".x", "version": "1"}, ["name '.x'"]),
        ({"version": "1", "lock": " \n"}, ["lock: it is empty"]),
        ({"version": "1", "lock": "torch==1"}, ["doesn't pin sglang"]),
        ({"version": "1", "wheel_dir": "wheels"}, ["an absolute path is needed"]),
        (
            {"version": "0.5.22", "lock": LOCK + "x\n", "requirements": ("a",), "wheel_dir": "w"},
            ["lock: line 3: 'x'", "requirements and lock", "wheel_dir 'w'"],
        ),
        ({"version": "0.5.22", "lock": LOCK}, ["it pins sglang 0.5.23, but the version asked for is 0.5.22"]),
    ],
)
def test_bad_specs_say_everything_at_once(values, problems):
    with pytest.raises(ReleaseError) as caught:
        check_spec(Spec(**values))
    assert len(caught.value.problems) == len(problems)
    for found, wanted in zip(caught.value.problems, problems):
        assert wanted in found


def test_comments_order_and_hashes_do_not_change_a_release():
    one = Spec(version="0.5.23", lock=LOCK)
    two = Spec(version="0.5.23", lock="# c\ntorch==2.14.1 --hash=sha256:a\nsglang==0.5.23 --hash=sha256:b\n")
    inputs = [inputs_of(spec, check_spec(spec)) for spec in (one, two)]
    assert inputs[0] == inputs[1]
    assert fingerprint_of(inputs[0], "3.11") != fingerprint_of(inputs[0], "3.12")


def complete(folder, spec, python="3.11", **changes):
    inputs = inputs_of(spec, check_spec(spec))
    record = Record("r", fingerprint_of(inputs, python), inputs, python, {"sglang": "0.5.23"}, "pip", "now")
    folder.mkdir()
    (folder / RECORD).write_text(json.dumps({**json.loads(record.to_json()), **changes}))


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda path: None, "absent"),
        (lambda path: path.mkdir(), "absent"),
        (lambda path: path.write_text("x"), "foreign"),
        (lambda path: (path.mkdir(), (path / "bin").mkdir()), "foreign"),
        (lambda path: (path.mkdir(), (path / PART).touch()), "partial"),
        (lambda path: (path.mkdir(), (path / RECORD).write_text("{")), "damaged"),
        (lambda path: complete(path, Spec(version="1"), schema=9), "damaged"),
        (lambda path: complete(path, Spec(version="1"), python="3.11", fingerprint="0"), "damaged"),
        (lambda path: complete(path, Spec(version="1")), "complete"),
        (lambda path: (complete(path, Spec(version="1")), (path / PART).touch()), "complete"),
    ],
)
def test_folder_states(tmp_path, make, state):
    make(tmp_path / "r")
    assert look(str(tmp_path / "r")).state == state


@pytest.mark.parametrize(
    ("before", "after", "minor", "texts"),
    [
        ({"version": "0.5.23"}, {"version": "0.5.23"}, "", None),
        ({"version": "0.5.23"}, {"version": "0.5.23"}, "3.11", None),
        ({"version": "0.5.23"}, {"version": "0.5.23"}, "3.12", ["Python 3.11 -> 3.12"]),
        ({"version": "0.5.23"}, {"version": "0.5.22"}, "", ["sglang 0.5.23 -> 0.5.22", "choose a new release name"]),
        (
            {"version": "1", "requirements": ("a>1",)},
            {"version": "1", "requirements": ("b",)},
            "",
            ["a>1 -> no a", "no b -> b"],
        ),
        ({"version": "0.5.23"}, {"version": "0.5.23", "lock": LOCK}, "", ["no lock -> a lock"]),
        (
            {"version": "0.5.23", "lock": LOCK},
            {"version": "0.5.23", "lock": LOCK.replace("2.14.1", "2.13.0") + "x==1"},
            "",
            ["torch==2.14.1 -> torch==2.13.0; no x -> x==1"],
        ),
    ],
)
def test_a_complete_release_is_immutable(tmp_path, before, after, minor, texts):
    folder = {"name": "r", "releases_dir": str(tmp_path)}
    complete(tmp_path / "r", Spec(**folder, **before))
    spec = Spec(**folder, **after)
    found = refusal(spec, check_spec(spec), look(spec.folder), minor)
    assert found is None if texts is None else all(text in str(found) for text in [*texts, str(tmp_path / "r")])


def probe_answer(version, **more):
    data = {
        "version": version,
        "executable": "/p",
        "machine": "x86_64",
        "libc": "glibc 2.36",
        "ensurepip": True,
        "venv": True,
        "packages": {},
        "engine": "",
        "fingerprint": "",
    }
    return json.dumps({**data, **more})


def test_a_shim_that_does_not_run_is_passed_over(runner):
    runner.on("python3.12", rc=127, stderr="pyenv: python3.12: command not found\n\nNote: see help")
    runner.on("python3.11", stdout="noise\n" + probe_answer([3, 11, 2]))
    runner.on("python3", stdout=probe_answer([3, 9, 2]))
    good, bad = find_interpreters(runner, "")
    assert [(p.path, p.minor, p.glibc) for p in good] == [("python3.11", "3.11", (2, 36))]
    assert bad == [
        "python3.12: pyenv: python3.12: command not found (rc 127)",
        "python3: Python 3.9, 3.11 or newer is needed",
    ]


@pytest.mark.parametrize(
    ("values", "environ", "conf", "uv", "kind", "reason"),
    [
        ({}, {}, "", True, "uv", "found"),
        ({}, {}, "", False, "pip", "no uv here"),
        ({"installer": "pip"}, {}, "", True, "pip", "asked for"),
        ({}, {"PIP_INDEX_URL": "https://x"}, "", True, "pip", "PIP_INDEX_URL is set, which uv doesn't read"),
        ({}, {}, "[global]\nextra-index-url = https://x\n", True, "pip", "sets extra-index-url"),
        ({}, {}, "[global]\ntimeout = 9\n", True, "uv", "found"),
        ({}, {}, "not an ini file", True, "uv", "found"),
        ({"wheel_dir": "/w"}, {"PIP_INDEX_URL": "https://x"}, "", True, "uv", "found"),
        ({"index_url": "https://y"}, {"PIP_INDEX_URL": "https://x"}, "", True, "uv", "found"),
        ({"installer": "uv"}, {"PIP_INDEX_URL": "https://x"}, "", True, "uv", "asked for"),
    ],
)
def test_installer(monkeypatch, tmp_path, values, environ, conf, uv, kind, reason):
    class Runner:
        def run(self, argv, *, timeout=30.0, env=None, cwd=None):
            return Result(0 if uv else 127)

    (tmp_path / "pip.conf").write_text(conf)
    monkeypatch.setattr(inst, "PIP_FILES", (str(tmp_path / "pip.conf"),))
    chosen = inst.choose_installer(Spec(version="1", **values), Runner(), environ)
    assert chosen.kind == kind
    assert reason in chosen.reason


def test_uv_that_is_not_there_is_a_problem(runner):
    assert "no uv that runs" in inst.choose_installer(Spec(version="1", installer="uv"), runner, {}).problems[0]


def test_commands_hold_no_addresses():
    spec = Spec(version="1", index_url="https://u:secret@h/s", extra_index_urls=("https://v:secret@h/t",))
    for kind, keys in (("pip", ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")), ("uv", ("UV_DEFAULT_INDEX", "UV_INDEX"))):
        installer = inst.Installer(kind, "/usr/bin/uv")
        assert "secret" not in " ".join(inst.install_command(spec, [], installer))
        env = inst.install_environment(spec, installer, "/t")
        assert [env[key] for key in keys] == ["https://u:secret@h/s", "https://v:secret@h/t"]


def test_commands_of_a_lock_and_a_wheel_folder():
    spec = Spec(version="0.5.23", lock=LOCK + "a==1 --hash=sha256:x\n", wheel_dir="/w")
    pins = check_spec(spec)
    pip = inst.install_command(spec, pins, inst.Installer("pip"))
    uv = inst.install_command(spec, pins, inst.Installer("uv", "/uv"))
    for argv in (pip, uv):
        assert {"--no-deps", "--no-index", "--require-hashes"} <= set(argv)
        assert argv[argv.index("--find-links") + 1] == "/w"
    assert uv[0] == "/uv"
    assert "--offline" in uv
    assert inst.install_environment(spec, inst.Installer("pip"), "/t")["PIP_CONFIG_FILE"] == "/dev/null"
    assert inst.requirements_text(spec, pins).splitlines()[0] == "a==1 --hash=sha256:x"
    assert inst.requirements_text(Spec(version="1", requirements=("x>2",)), []) == "sglang==1\nx>2\n"


@pytest.mark.parametrize(
    ("path", "package"),
    [("python3", "python3-venv"), ("/usr/bin/python3", "python3-venv"), ("python3.12", "python3.12-venv")],
)
def test_the_package_with_ensurepip(path, package):
    version = (3, 12, 1) if "12" in path else (3, 11, 2)
    assert inst.venv_package(Interpreter(path, version)) == package


@pytest.mark.parametrize(
    ("output", "line", "remedy"),
    [
        (
            "Installing\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "No space",
            "free space",
        ),
        (
            "WARNING: Retrying (Retry(total=0)): Failed to establish a new connection: [Errno -3] Temporary failure "
            "in name resolution\nERROR: Could not find a version that satisfies the requirement x (from: none)\n"
            "ERROR: No matching distribution found for x\n",
            "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
            "doesn't reach the package index",
        ),
        ("ERROR: No matching distribution found for sglang==9\n", "sglang==9", "correct the version"),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n",
            "HASHES",
            "isn't the one the lock was made from",
        ),
        (
            "error: Failed to fetch\n  Caused by: Hash mismatch for `a==1`\n",
            "Hash mismatch",
            "isn't the one the lock was made from",
        ),
        (
            "ERROR: a-1-cp39-cp39-linux_x86_64.whl is not a supported wheel on this platform.\n",
            "not a supported",
            "another Python, machine",
        ),
        (
            "Error: Command '['/v/bin/python', '-m', 'ensurepip']' returned non-zero\nNo module named ensurepip\n",
            "ensurepip",
            "install python3-venv",
        ),
        ("something odd\n", "something odd", "read the log"),
    ],
)
def test_explain(output, line, remedy):
    text = explain("/r: installing with pip", 1, output, "/r.log")
    assert line in text
    assert remedy in text.rsplit("Remedy:", 1)[1]
    assert "log: /r.log" in text


def test_explain_signals_and_time():
    assert "signal 9" in explain("x", 137, "", "/l")
    assert "ran out of time" in explain("x", 124, "", "/l")
    assert causes("$ pip install error\nLooking in indexes: x\nfine") == ["$ pip install error", "fine"]
