# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Detect, repair, verify: from what a host has to a CUDA_HOME that was proven, or to all reasons why there is none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_compose as comp
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_host as host
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_inplace as inplace
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_probe as probes
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_state as state
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_wheels as wheels
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding, errors
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import Seals, audit
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_build import (
    ALL,
    COMPOSE,
    IN_PLACE,
    NONE,
    Build,
    Settings,
    manifest_of,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_choose import Choice, choose
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_finish import finish
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_folder import check_folder, one_spelling
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import candidates, check_cuda_home
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import (
    CCCL_FAULTS,
    COMPOSABLE,
    examine,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_outcome import DONE, PLANNED, UNPROVEN, Outcome
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import Python, ask
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_stub import StubError

RELEASE = "gpufleet-release.json"  # in a venv that sglang_release made and verifies


def run(settings: Settings, runner: Runner, environ: Mapping[str, str], *, check: bool = False) -> Outcome:
    """Do it all; never raises for what a host lacks."""
    out = Outcome()
    problem = check_folder(settings.folder, os.geteuid())  # as it is named: who owns a link above can lead us elsewhere
    folder, interpreter = one_spelling(settings.folder), one_spelling(settings.python)
    settings = replace(settings, folder=folder, python=interpreter, config_dir=os.path.realpath(settings.config_dir))
    python = ask(runner, settings.python)
    if isinstance(python, str):
        out.findings.append(Finding("venv_missing", python, "Install the engine first (--tags engine)"))
        return finish(settings, out, state.load(settings.config_dir), check)
    with ExitStack() as stack:
        if problem:
            out.findings.append(Finding("folder_unsafe", problem, "Give another folder, or correct this one"))
        elif not check and settings.repair != NONE:
            try:
                stack.enter_context(apply.locked(settings.folder))
            except apply.ApplyError as exc:
                out.findings.append(Finding("folder_unwritable", str(exc)))
        before = state.load(settings.config_dir)  # under the lock: what another run has just proven counts
        safe = not out.findings  # what a folder says that is not safe counts for nothing
        seals = Seals(settings.folder if safe else "")
        try:
            _work(settings, runner, environ, python, seals, before, out, check)
            if safe and not check and settings.repair != NONE:
                seals.save()
        except (FileError, OSError) as exc:  # a folder that cannot be read, a disk that is full
            name = getattr(exc, "filename", None) or settings.folder
            text = f"{name}: {exc.strerror}" if isinstance(exc, OSError) else str(exc)
            out.findings.append(Finding("not_accessible", text, "Correct the cause, and run this again"))
            out.proven = False
        if not out.proven and settings.repair != NONE:
            _set_aside(out)
        return finish(settings, out, before, check)


def _work(
    settings: Settings, runner: Runner, environ: Mapping[str, str], python: Python, seals: Seals,
    before: Mapping[str, Any], out: Outcome, check: bool,
) -> None:  # fmt: skip
    in_place = settings.repair == IN_PLACE
    out.flashinfer = python.packages.get("flashinfer-python", "")
    lost = []
    if not out.findings:  # a record in a folder that is not safe says nothing
        lost = _find_lost(settings, python, before, out, check)
        if settings.repair == COMPOSE:
            _leave_in_place(settings, python, out, check)
    unseen = {item.path for item in lost}
    layouts, found = candidates(python, settings.cuda_home, environ, settings.base)
    out.findings += found
    layouts = [replace(item, hidden=inplace.hidden(settings.folder, item.root) | unseen) for item in layouts]
    out.toolkits = [examine(runner, item, python, audit(python.infos, item.root, seals)) for item in layouts]
    first = next((item.versions.get("nvcc", "") for item in out.toolkits), "")
    archs, found = host.archs_of(runner, settings.archs, first)
    out.findings += found
    choice = choose(out.toolkits, python, archs, install=settings.skew == "install", in_place=in_place)
    if settings.cuda_home and not layouts:
        choice = Choice()
    private = wheels.private_set(settings.folder, ALL, python.wanted, seals) if choice.private else None
    out.findings += [*choice.findings, *_host_findings(settings, runner, python, choice, private)]
    mended = {item.code for item in choice.findings} if choice.private else COMPOSABLE
    out.mendable = mended | (set() if in_place else CCCL_FAULTS)
    if in_place and os.path.exists(f"{python.prefix}/{RELEASE}"):
        text = f"{python.prefix} is a release, whose files are verified: nothing is added to it"
        out.findings.append(Finding("in_place_release", text, "Use repair compose, or a venv of your own"))
        return
    if in_place and choice.toolkit and check_cuda_home(choice.toolkit.root):
        text = f"{choice.toolkit.root} cannot be a CUDA_HOME: {check_cuda_home(choice.toolkit.root)}"
        out.findings.append(Finding("cuda_home_bad", text, "Use repair compose, or a venv with another path"))
        return
    if choice.toolkit is None or any(item.code.startswith("folder_") for item in out.findings):
        return
    build = Build(settings, runner, python, choice.toolkit, private, seals=seals)
    build.find_versions()
    if not choice.private and _as_it_is(settings, build, archs, before, out):
        return
    if settings.repair != NONE:
        _repair(build, archs, before, out, check)


def _set_aside(out: Outcome) -> None:
    """What would be mended is nobody's work beside what keeps it from being done; without wheels it may be."""
    if {item.code for item in out.problems} & {"wheels_unreachable", "wheels_broken"}:
        out.mendable = out.mendable & (COMPOSABLE | CCCL_FAULTS)
    if {item.code for item in out.problems} - out.mendable:
        out.findings = [replace(i, severity=WARNING) if i.code in out.mendable else i for i in out.findings]


def _host_findings(
    settings: Settings, runner: Runner, python: Python, choice: Choice, private: wheels.Private | None
) -> list[Finding]:
    needs = replace(settings.needs, folder=settings.folder)
    found = host.tool_findings(runner, python, choice.toolkit, needs)
    found += host.place_findings(needs, tempfile.gettempdir(), wheels.SIZE if private and not private.complete else 0)
    tree = [choice.toolkit.root] if choice.toolkit else []
    return found + host.reach_findings([settings.folder, python.prefix, *tree], needs.user)


def _find_lost(
    settings: Settings, python: Python, before: Mapping[str, Any], out: Outcome, check: bool
) -> list[inplace.Addition]:
    """Additions in place that no record names any longer are recorded again, or (composing) named."""
    lost = inplace.lost(settings.folder, python.tree, before)
    if lost and settings.repair == IN_PLACE:
        out.changed = True
        if not check:
            inplace.adopt(settings.folder, python.tree, lost)
    elif lost:
        out.findings.append(inplace.unrecorded(settings.folder, python.tree, lost))
    return lost


def _leave_in_place(settings: Settings, python: Python, out: Outcome, check: bool) -> None:
    """Composing again after the in-place mode takes the additions back."""
    record = inplace.record_path(settings.folder, python.tree)
    if python.tree and os.path.exists(record):
        out.changed = True
        gone = [item.path for item in inplace.load(record)] if check else inplace.undo(record)
        text = "".join(f"{path}\n" for path in gone)
        out.diff.append({"before_header": python.tree, "after_header": python.tree, "before": text, "after": ""})


def _as_it_is(settings: Settings, build: Build, archs: Sequence[str], before: Mapping[str, Any], out: Outcome) -> bool:
    """Prove a system toolkit where it lies: one that compiles, links and loads is left alone."""
    toolkit = build.toolkit
    whole = not toolkit.codes() & (COMPOSABLE | CCCL_FAULTS)
    if settings.repair == IN_PLACE or (settings.repair == COMPOSE and (toolkit.layout.kind == "pip" or not whole)):
        return False
    if settings.cccl not in ("auto", "toolkit") or check_cuda_home(toolkit.root):
        return False
    build.cccl = comp.own_cccl(build.sources()[:1])
    build.plan_entries()
    trial = Outcome(findings=list(out.findings))
    _prove(build, toolkit.root, archs, before, trial)
    if not trial.proven and settings.repair != NONE:
        return False  # composing may help
    out.findings, out.proofs, out.known, out.proven = trial.findings, trial.proofs, trial.known, trial.proven
    out.versions, out.cuda_home = build.versions, toolkit.root if trial.proven else None
    out.details = _details(build, archs, "as it is")
    return True


def _repair(build: Build, archs: Sequence[str], before: Mapping[str, Any], out: Outcome, check: bool) -> None:
    settings = build.settings
    build.plan_cccl(before)
    waiting = build.missing_sets()
    if waiting and check:
        out.changed = True
        home = str(before.get("cuda_home") or "")
        made = f"{settings.folder}/<version>-<fingerprint>"
        header = {"before_header": home or "no CUDA_HOME", "after_header": f"{made}, known once the wheels are there"}
        out.diff.append({**header, "before": manifest_of(home) if home else "", "after": build.forecast()})
        out.findings += [item for waits in waiting for item in waits.findings("To be installed again (check mode)")]
        out.repaired, out.stage, out.tree = build.mended(), PLANNED, made
        out.details, out.versions = _details(build, archs, settings.repair), build.versions
        out.cuda_home = home or None
        out.proven = True  # as far as it can be told without installing
        return
    if not _install(build, before, out):
        return
    build.find_versions()
    if build.cccl is None:
        text = "no CCCL of nvcc's version was found (nv/target, cuda/std, cub, thrust)"
        out.findings.append(Finding("cccl_missing", text, "Let cccl be auto, or make its wheel reachable"))
        return
    build.plan_entries()
    path, differs = build.path, build.differs()
    shown = _diff(build, before, path)
    if differs and not check:
        try:
            build.write()
        except (apply.ApplyError, StubError, FileError, OSError) as exc:
            out.findings.append(Finding("not_written", f"{path} could not be made: {exc}", "Correct the cause"))
            return
    out.changed, out.diff = out.changed or differs, [*out.diff, *shown]
    out.repaired = build.mended()
    out.tree, out.stage = path, PLANNED if check and differs else DONE
    out.repairs, out.versions = build.repairs(), build.versions
    out.findings += build.notes
    out.details = _details(build, archs, settings.repair)
    if check and differs:
        out.cuda_home, out.proven = path, True  # what the run will prove
        return
    _prove(build, path, archs, before, out)
    out.cuda_home = path if out.proven else None
    if not out.proven:
        out.stage = UNPROVEN
    elif not check:
        state.set_users(settings.folder, sorted({*state.users(settings.folder), settings.config_dir}))


def _install(build: Build, before: Mapping[str, Any], out: Outcome) -> bool:
    """Install the private sets that are missing; False when one cannot be had and nothing stands in for it."""
    for _round in range(2):  # the first brings the compiler, by whose version a CCCL may be needed then
        for item in build.missing_sets():
            try:
                wheels.install(build.runner, item, build.python.path, build.settings.origin)
                out.changed = True
                out.findings += item.findings("Installed again")
            except wheels.WheelError as exc:
                out.findings += item.findings("Make its wheels reachable, and run this again")
                if item is build.cccl_wheel and build.use_engine_cccl(str(exc).split("\n", maxsplit=1)[0]):
                    continue
                out.findings.append(Finding("wheels_unreachable", str(exc)))
                return False
        if build.private:
            build.private = build.private_set(ALL, build.python.wanted)
        build.find_versions()
        build.plan_cccl({"cccl": {"origin": build.cccl.origin}} if build.notes and build.cccl else before)
    for item in build.missing_sets():
        text = f"{item.folder} was installed, and is not whole: {item.flaw or 'its folders are missing'}"
        out.findings.append(Finding("wheels_broken", text, "Correct wheel_dir or the index, and run this again"))
    return not build.missing_sets()


def _prove(build: Build, home: str, archs: Sequence[str], before: Mapping[str, Any], out: Outcome) -> None:
    """Run the probes whose proof is not known yet; a host that lacks a compiler is not asked."""
    settings, python = build.settings, build.python
    blocked = {item.code for item in errors(out.findings)} & {
        "gcc_missing",
        "cxx_missing",
        "arch_unknown",
        "arch_list_bad",
    }
    if blocked:
        return
    environment = host.unit_environment(python, home, settings.needs.environment)
    own = next((f"{t}/lib/{n}" for t in python.trees for n in _numbered(f"{t}/lib")), "")
    bench = probes.Bench(home, python.path, environment, own)
    earlier = probes.known_proofs(before)
    proven = True
    for probe in probes.SOURCES:
        for arch in archs:
            name, key = probes.name_of(probe, arch), probes.proof_key(bench, probe, arch, build.identity)
            if earlier.get(name) == key and not (settings.prove_again and probe in settings.probes):
                out.known[name] = key
            elif probe in settings.probes:
                proof = probes.prove(build.runner, bench, probe, arch)
                out.proofs.append(proof)
                proven = proven and proof.ok
                if proof.ok:
                    out.known[name] = key
                else:
                    out.findings += [replace(item, code=f"probe_{item.code}") for item in proof.findings()]
    out.proven = proven and bool(archs)


def _numbered(folder: str) -> list[str]:
    try:
        return [name for name in sorted(os.listdir(folder)) if name.startswith("libcudart.so.")]
    except OSError:
        return []


def _details(build: Build, archs: Sequence[str], how: str) -> dict[str, Any]:
    cccl = {"origin": build.cccl.origin, "version": build.cccl.version} if build.cccl else {}
    return {
        "how": how,
        "source": build.toolkit.root,
        "layout": build.toolkit.layout.kind,
        "private": build.private.folder if build.private else None,
        "cccl": cccl,
        "arch_list": list(archs),
        "python": build.python.path,
    }


def _diff(build: Build, before: Mapping[str, Any], path: str) -> list[dict[str, str]]:
    if build.settings.repair == IN_PLACE:
        recorded = inplace.load(inplace.record_path(build.settings.folder, build.toolkit.root))
        old = "".join(
            f"{item.path}{f' -> {item.mark}' if item.kind == 'link' else ''}\n" for item in recorded if item.ours()
        )
        new = "".join(f"{build.toolkit.root}/{entry.line()}\n" for entry in build.additions())
        return [{"before_header": path, "after_header": path, "before": old, "after": new}] if build.differs() else []
    earlier = str(before.get("cuda_home") or "")
    old, new = manifest_of(earlier) if earlier else "", comp.manifest(build.entries)
    if apply.intact(path, build.entries) and earlier == path:
        return []
    return [{"before_header": earlier or "no CUDA_HOME", "after_header": path, "before": old, "after": new}]
