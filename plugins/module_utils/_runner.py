# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Running commands, behind an interface that tests replace."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

TIMED_OUT = 124
NOT_FOUND = 127


@dataclass(frozen=True)
class Result:
    """What a command left behind.

    rc is the exit status (128+N when signal N ended it, 124 when it ran out of time, 127 when
    there is no such program); stdout and stderr are decoded as UTF-8, undecodable bytes replaced.
    """

    rc: int
    stdout: str = ""
    stderr: str = ""


class Runner(Protocol):
    """Anything that runs a command."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run argv (no shell) for at most timeout seconds; never raises for a command that fails."""


class SubprocessRunner:
    """The real thing.

    AnsibleModule.run_command() has no time limit, and a hung nvidia-smi or a stuck mount must not
    hang a deploy; hence subprocess.
    """

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run argv; env, when given, is added to a C.UTF-8 copy of this process's environment."""
        full = {**os.environ, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", **(env or {})}
        try:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=full, cwd=cwd
            )
        except (FileNotFoundError, NotADirectoryError):
            return Result(NOT_FOUND, "", f"{argv[0]}: not found")
        except OSError as exc:
            return Result(126, "", f"{argv[0]}: {exc.strerror}")
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as exc:
            process.kill()
            # Not wait(): a process stuck in the driver (state D) does not die, and must not hold us too.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
            return Result(TIMED_OUT, _text(exc.stdout), f"{argv[0]} did not finish within {timeout:g} s")
        rc = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return Result(rc, _text(out), _text(err))


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", errors="replace")
