# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Built modules laid out as FlashInfer's ahead-of-time loading finds them: no lock, no compiler, a read-only folder.

A package flashinfer_jit_cache in a folder of its own, which units have on PYTHONPATH; the venv stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError, FileSpec, digest, write_files

PACKAGE = "flashinfer_jit_cache"
RECORD = "published.json"
PROVIDER = '''"""Kernels that gpufleet.sglang built for this host; made by flashinfer_jit_warm."""

from pathlib import Path
from types import SimpleNamespace

__version__ = {version!r}
_FOLDER = Path(__file__).parent / "modules"


def get_jit_cache_dir():
    return str(_FOLDER)


def get_jit_cache_providers():
    return (
        SimpleNamespace(
            provider_id="gpufleet",
            distribution="flashinfer-jit-cache",
            version=__version__,
            jit_cache_dir=_FOLDER,
            cuda_architectures=frozenset({archs!r}),
            modules=frozenset(path.name for path in _FOLDER.iterdir()),
        ),
    )
'''


def record_of(version: str, arch: str, libraries: Mapping[str, Sequence[object]]) -> str:
    """Return what tells one published set from another: version, architectures, each module's digest."""
    modules = {name: str(item[-1]) for name, item in sorted(libraries.items())}
    return json.dumps({"flashinfer": version, "arch": arch, "modules": modules}, indent=2, sort_keys=True) + "\n"


def of_flashinfer(libraries: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
    """Return FlashInfer's among the libraries: SGLang's own are loaded from their cache without a lock."""
    return {name: item for name, item in libraries.items() if "/cached_ops/" in str(item[0])}


def published(folder: str) -> str:
    """Return the record of what lies there, "" when there is nothing whole."""
    try:
        return Path(folder, RECORD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _whole(folder: str, record: str, provider: str, libraries: Mapping[str, Sequence[object]]) -> bool:
    """Tell whether all of it lies there as it was made: a lost or cut-off library is a server that does not start."""
    if published(folder) != record:
        return False
    top = Path(folder, PACKAGE)
    try:
        return (top / "__init__.py").read_text(encoding="utf-8", errors="replace") == provider and all(
            digest(str(top / f"modules/{name}/{name}.so")) == str(item[-1]) for name, item in libraries.items()
        )
    except OSError:
        return False


def publish(folder: str, version: str, arch: str, libraries: Mapping[str, Sequence[object]], *, check: bool) -> bool:
    """Copy the libraries beside the place and swap; returns whether that was needed. Raises FileError."""
    record = record_of(version, arch, libraries)
    archs = sorted(f"sm{item.replace('.', '')}" for item in arch.split())
    provider = PROVIDER.format(version=version, archs=archs)
    if _whole(folder, record, provider, libraries):
        return False
    if check:
        return True
    part, old = f"{folder}.new", f"{folder}.old"
    try:
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)
        for name, item in libraries.items():
            os.makedirs(f"{part}/{PACKAGE}/modules/{name}")
            shutil.copyfile(str(item[0]), f"{part}/{PACKAGE}/modules/{name}/{name}.so")
        write_files([FileSpec(f"{part}/{PACKAGE}/__init__.py", provider), FileSpec(f"{part}/{RECORD}", record)])
        for base, _folders, _names in os.walk(part):
            os.chmod(base, 0o755)
        if os.path.isdir(folder):
            os.rename(folder, old)
        os.rename(part, folder)
    except OSError as exc:
        raise FileError(f"{folder}: {exc.strerror}; what was published before is still there") from exc
    shutil.rmtree(old, ignore_errors=True)
    return True
