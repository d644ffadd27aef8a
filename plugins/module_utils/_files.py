# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Writing a set of small files: all of them, or (disk full, killed) the old ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class FileError(Exception):
    """A file could not be written; the message names it and says that nothing was changed."""


@dataclass(frozen=True)
class FileSpec:
    """A file as it should be: absolute path, text, permission bits."""

    path: str
    content: str
    mode: int = 0o644
    secret: bool = False  # never shown in a diff


@dataclass(frozen=True)
class FileChange:
    """A file that differs from its specification; before is None when there is none."""

    spec: FileSpec
    before: str | None
    before_mode: int | None

    @property
    def diff(self) -> dict[str, str]:
        """Return the change in Ansible's diff format; a secret's text is replaced by its size."""
        mode = f"{self.spec.mode:04o}"
        before = _shown(self.before, self.spec.secret)
        after = _shown(self.spec.content, self.spec.secret)
        if self.before_mode is not None and self.before_mode != self.spec.mode:
            before = f"# mode {self.before_mode:04o}\n{before}"
            after = f"# mode {mode}\n{after}"
        header = self.spec.path
        return {"before_header": header, "after_header": header, "before": before, "after": after}


def read_text(path: str) -> str | None:
    """Return a file's text, None when there is none; undecodable bytes become replacement characters."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def digest(path: str) -> str:
    """Return the hash of a file's content."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def file_changes(specs: Iterable[FileSpec]) -> list[FileChange]:
    """Return what differs from the specifications, in their order; raises FileError for an unreadable file."""
    changes = []
    for spec in specs:
        try:
            before = read_text(spec.path)
            mode = None if before is None else stat.S_IMODE(os.stat(spec.path).st_mode)
        except OSError as exc:
            raise FileError(f"{spec.path}: {exc.strerror}") from exc
        if before != spec.content or mode != spec.mode:
            changes.append(FileChange(spec, before, mode))
    return changes


def write_files(specs: Sequence[FileSpec]) -> None:
    """Write every file beside its place, flush it, then rename them all.

    A full disk fails before the first rename, so the old set stays whole; a process killed between
    two renames leaves a mixture, which the next run sees as a change. Raises FileError.
    """
    temporary: list[tuple[str, str]] = []
    try:
        for spec in specs:
            folder = os.path.dirname(spec.path)
            os.makedirs(folder, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{os.path.basename(spec.path)}.", dir=folder)
            temporary.append((name, spec.path))
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                os.fchmod(stream.fileno(), spec.mode)
                stream.write(spec.content)
                stream.flush()
                os.fsync(stream.fileno())
        for name, path in temporary:
            os.replace(name, path)
    except OSError as exc:
        raise FileError(
            f"{specs[len(temporary) - 1].path if temporary else ''}: {exc.strerror}; no file was changed"
        ) from exc
    finally:
        for name, _path in temporary:
            with contextlib.suppress(OSError):
                os.unlink(name)


def remove_files(paths: Iterable[str]) -> list[str]:
    """Remove files that are there; returns those."""
    removed = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            removed.append(path)
    return removed


def _shown(text: str | None, secret: bool) -> str:
    if text is None:
        return ""
    return f"# {len(text.splitlines())} secret line(s)\n" if secret else text
