# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""From a chosen toolkit to the tree that completes it: sources, one CCCL, the entries, and writing them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_apply as apply
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_compose as comp
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_inplace as inplace
from ansible_collections.gpufleet.sglang.plugins.module_utils import _toolkit_wheels as wheels
from ansible_collections.gpufleet.sglang.plugins.module_utils._finding import WARNING, Finding
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_audit import Seals
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_host import Needs, unit_environment
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import RECORD, layout_of, multiarch
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_look import Toolkit, find_versions
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_python import (
    COMPONENTS,
    Python,
    installed_infos,
    owned_files,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_stub import StubError, make_stub

COMPOSE, IN_PLACE, NONE = "compose", "in_place", "none"
ALL = tuple(COMPONENTS)


@dataclass(frozen=True)
class Settings:
    """What the user wants."""

    python: str
    folder: str
    config_dir: str
    cuda_home: str = ""
    archs: tuple[str, ...] = ()
    repair: str = COMPOSE  # compose | in_place | none
    skew: str = "install"  # install | fail
    cccl: str = "auto"  # auto | toolkit | wheel | engine
    probes: tuple[str, ...] = ("link",)
    prove_again: bool = False
    needs: Needs = field(default_factory=Needs)
    origin: wheels.Origin = field(default_factory=wheels.Origin)
    base: str = "/"


@dataclass
class Build:
    """One chosen toolkit on its way to a tree."""

    settings: Settings
    runner: Runner
    python: Python
    toolkit: Toolkit
    private: wheels.Private | None = None  # compiler and headers, where the environment's do not fit
    cccl: comp.Cccl | None = None
    cccl_wheel: wheels.Private | None = None
    versions: dict[str, str] = field(default_factory=dict)
    entries: list[comp.Entry] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    seals: Seals = field(default_factory=Seals)

    def private_set(self, parts: Sequence[str], specifier: str) -> wheels.Private:
        """Look for a private set of wheels."""
        return wheels.private_set(self.settings.folder, parts, specifier, self.seals)

    def missing_sets(self) -> list[wheels.Private]:
        """Return the private sets that are to be installed first."""
        return [item for item in (self.private, self.cccl_wheel) if item and not item.complete]

    def mended(self) -> set[str]:
        """Return the codes of what the tree has right that the toolkit has wrong."""
        stays = {"cccl_mixed", "cccl_damaged"} if self.settings.repair == IN_PLACE else set()
        return {item.code for item in self.toolkit.findings} - stays - {"wheel_changed"}

    def sources(self) -> list[comp.Source]:
        """Return where the tree's files come from, first ones first."""
        found = []
        mine = comp.Source(self.toolkit.layout, self.toolkit.owned)
        components = frozenset(COMPONENTS.values())
        if self.private:
            tree = self.private.tree
            found.append(
                comp.Source(layout_of(tree, "private"), owned_files(installed_infos(self.private.folder), tree))
            )
            mine = replace(mine, without=components)
        found.append(mine)
        if self.toolkit.layout.kind != "pip" and self.python.tree:  # cublas, nvrtc, curand: torch's own
            layout = layout_of(self.python.tree, "pip")
            found.append(comp.Source(layout, owned_files(self.python.infos, self.python.tree), components))
        return found

    def plan_cccl(self, before: Mapping[str, Any]) -> None:
        """Choose the one CCCL: the toolkit's own, else a private wheel of its version, else the engine's."""
        wish = self.settings.cccl
        spoilt = self.toolkit.codes() & {"cccl_mixed", "cccl_damaged"} and not self.private
        sources = self.sources() if not self.private or self.private.complete else []
        own = None if spoilt else comp.own_cccl(sources[:1])
        wheel = self.private_set(("cccl",), self._cccl_version())
        engine = comp.engine_cccl(self.python.cccl)
        kept = before.get("cccl", {}) if isinstance(before.get("cccl"), dict) else {}
        if wish in ("auto", "toolkit") and own:
            self.cccl = own
        elif wish == "engine" or (wish == "auto" and engine and kept.get("origin") == "engine" and not wheel.complete):
            self.cccl = engine
        elif wish == "toolkit" or (self.private and not self.private.complete):
            pass  # nothing, or the private set's, known once it is there
        else:
            self.cccl_wheel = wheel
            self.cccl = comp.wheel_cccl(wheel.tree) if wheel.complete else None

    def use_engine_cccl(self, reason: str) -> bool:
        """Fall back to the CCCL that FlashInfer brings; returns whether there is one."""
        engine = comp.engine_cccl(self.python.cccl) if self.settings.cccl == "auto" else None
        if engine is None:
            return False
        self.cccl, self.cccl_wheel = engine, None
        text = f"CCCL {engine.version} is FlashInfer's, for no wheel of nvcc's version could be installed: {reason}"
        self.notes.append(Finding("cccl_engine", text, "Nothing, or make the wheels reachable", WARNING))
        return True

    def _cccl_version(self) -> str:
        nvcc = self.versions.get("nvcc") or self.toolkit.versions.get("nvcc", "")
        parts = nvcc.split(".")
        return f"=={parts[0]}.{parts[1]}.*" if len(parts) > 1 else self.python.wanted

    def find_versions(self) -> None:
        """Tell the versions of what the tree is made of."""
        self.versions = dict(self.toolkit.versions)
        if self.private and self.private.complete:
            infos = installed_infos(self.private.folder)
            packages = {
                name: os.path.basename(path)[: -len(".dist-info")].rpartition("-")[2] for name, path in infos.items()
            }
            layout = layout_of(self.private.tree, "private")
            nvcc = layout.find("bins", "nvcc") or ""
            self.versions = find_versions(self.runner, layout, replace(self.python, packages=packages), nvcc)
            if self.python.torch:
                self.versions["torch_cuda"] = self.python.torch
        if self.cccl and self.cccl.version:
            self.versions["cccl"] = self.cccl.version

    def plan_entries(self) -> None:
        """Lay out the tree."""
        driver = comp.driver_library(self.settings.base, multiarch())
        self.entries = comp.compose(self.sources(), self.cccl, driver, whole=self.settings.repair == IN_PLACE)

    def forecast(self) -> str:
        """Say what the tree will be while sets of wheels are still to be installed: what is known of it, and what not.

        Links to what is there already are known exactly, those to a set as far as every such set has the file.
        """
        waiting = self.missing_sets()
        sources = [comp.Source(self.toolkit.layout, self.toolkit.owned)] if self.private else self.sources()
        if self.private:
            sources = [replace(sources[0], without=frozenset(COMPONENTS.values()))]
        driver = comp.driver_library(self.settings.base, multiarch())
        lines = [f"{item.folder} ({item.requirement}, to be installed)" for item in waiting]
        entries = {entry.path: entry.line() for entry in comp.compose(sources, self.cccl, driver)}
        major = (self._cccl_version() if not self.private else self.python.wanted).lstrip("=").partition(".")[0]
        tree = f"{waiting[0].folder}/nvidia/cu{major}"
        if not self.cccl:
            entries["include/cccl"] = f"include/cccl/... -> a link per file of {tree}/include/cccl"
            entries["include/nv"] = "include/nv -> cccl/nv"
        if self.private in waiting:
            entries.update({name: f"{name} -> {tree}/{name}" for name in comp.EXPECTED})
            entries["lib/libcudart.so"] = "lib/libcudart.so -> libcudart.so.N, as the set numbers it"
            if not driver:
                entries[comp.STUB] = f"{comp.STUB} (generated from {tree}/include/cuda.h)"
        lines += [entries[name] for name in sorted(entries)]
        lines += [f"(a link for every other file of {item.requirement}: known once it is there)" for item in waiting]
        return "".join(f"{line}\n" for line in lines)

    @property
    def identity(self) -> str:
        """The fingerprint of all that the tree leads to."""
        found = comp.fingerprint(self.entries)
        in_place = self.settings.repair == IN_PLACE
        return f"{found}-{inplace.state(self.toolkit.root, self.entries)}" if in_place else found

    @property
    def path(self) -> str:
        """Where the tree belongs."""
        if self.settings.repair == IN_PLACE:
            return self.toolkit.root
        return f"{self.settings.folder}/{self.versions.get('nvcc', 'unknown')}-{self.identity}"

    def additions(self) -> list[comp.Entry]:
        """Return what the tree lacks where pip put it."""
        recorded = inplace.load(inplace.record_path(self.settings.folder, self.toolkit.root))
        return inplace.wanted(self.toolkit.root, self.entries, recorded)

    def differs(self) -> bool:
        """Tell whether something is to be written."""
        if self.settings.repair != IN_PLACE:
            return not apply.intact(self.path, self.entries)
        recorded = inplace.load(inplace.record_path(self.settings.folder, self.toolkit.root))
        return any(inplace.differs(self.toolkit.root, self.additions(), recorded))

    def stub(self, include: str, out: str) -> int:
        """Make the stub of the driver's library."""
        env = unit_environment(self.python, "", self.settings.needs.environment)
        name = env.get("CC") or "gcc"
        compiler = shutil.which(name, path=env["PATH"])
        if not compiler:
            raise StubError(f"{name} is not on the unit's PATH: the stub of libcuda.so needs a C compiler")
        return make_stub(self.runner, include, out, compiler)

    def write(self) -> None:
        """Write the tree, or the additions; the folder's lock is held."""
        if self.settings.repair == IN_PLACE:
            inplace.apply(self.settings.folder, self.toolkit.root, self.additions(), self.stub)
            return
        record = {"fingerprint": self.identity, "versions": self.versions, "source": self.toolkit.root}
        apply.write_tree(self.path, self.entries, record, self.stub)

    def repairs(self) -> list[str]:
        """Say what was made that the toolkit itself does not have."""
        entries = self.additions() if self.settings.repair == IN_PLACE else self.entries
        found = []
        if self.private:
            found.append(f"compiler and headers from {self.private.requirement} in {self.private.folder}")
        for entry in entries:
            if entry.path.startswith("targets/"):
                continue
            if (
                entry.kind != "link"
                or not entry.target.startswith("/")
                or (entry.path == comp.STUB and not entry.target.startswith(self.toolkit.root))
            ):
                found.append(entry.line())
        if self.cccl:
            found.append(
                f"CCCL {self.cccl.version} ({self.cccl.origin}) from {os.path.dirname(self.cccl.folders['cuda'])}"
            )
        return found


def manifest_of(tree: str) -> str:
    """Return a composed tree on disk as a manifest, "" when there is none."""
    if tree not in apply.trees(os.path.dirname(tree)):
        return ""
    lines = []
    for folder, folders, files in os.walk(tree):
        for name in sorted([*folders, *files]):
            path = f"{folder}/{name}"
            relative = os.path.relpath(path, tree)
            if os.path.islink(path):
                lines.append(f"{relative} -> {os.readlink(path)}")
            elif os.path.isfile(path) and relative == comp.STUB:
                header = f"{tree}/include/cuda.h"
                lines.append(
                    f"{relative} (generated from {os.readlink(header) if os.path.islink(header) else 'nothing'})"
                )
            elif os.path.isfile(path) and relative != RECORD:
                lines.append(f"{relative} (written here)")
    return "".join(f"{line}\n" for line in sorted(lines))
