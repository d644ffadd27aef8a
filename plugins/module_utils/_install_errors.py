# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What a failed pip or uv means: the lines that say why, and the remedy."""

from __future__ import annotations

import re

from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import TIMED_OUT

_NOISE = re.compile(
    r"^(\[notice\]|WARNING: (Retrying|Location|You are using|Running pip)|Looking in|\s*Downloading )", re.I
)
_CAUSE = re.compile(
    r"(\berror\b|\u00d7|\u2570\u2500\u25b6|No space|hint:|Caused by|cause:|not found|not available|Failed to)",
    re.I,
)

# signs in the output, in lower case, and the remedy; the first that is there counts
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("no space left on device",),
        "free space on that file system, or put releases_dir on another one",
    ),
    (
        ("do not match the hashes", "hash mismatch"),
        "the file isn't the one the lock was made from: fetch it anew, or renew the lock",
    ),
    (
        ("hashes are required", "requires all requirements to have a hash", "in `--require-hashes` mode"),
        "give every line of the lock a hash, or none",
    ),
    (
        ("no module named ensurepip", "ensurepip is not"),
        "install python3-venv",
    ),
    (
        ("certificate_verify_failed", "invalid peer certificate"),
        "make this host trust the index's certificate (SSL_CERT_FILE, PIP_CERT)",
    ),
    (
        ("401 ", "403 ", "unauthorized"),
        "the index wants other credentials: put them into index_url",
    ),
    (
        (
            "name resolution",
            "name or service not known",
            "dns error",
            "network is unreachable",
            "connection refused",
            "failed to establish a new connection",
            "connecttimeout",
            "read timed out",
            "error sending request",
        ),
        "this host doesn't reach the package index: set index_url to one it reaches, or use a wheel folder (wheel_dir)",
    ),
    (
        ("requires a different python", "requires-python"),
        "use another Python (option python), or other versions",
    ),
    (
        ("not a supported wheel", "no wheels with a matching", "has no wheels", "platform tag"),
        "the wheel is for another Python, machine or a newer glibc: use another Python, or other wheels",
    ),
    (
        ("no matching distribution", "no solution found", "no version of", "not found in the "),
        "correct the version, or add an index or a wheel folder that has it for this Python and machine",
    ),
    (
        ("subprocess-exited-with-error", "failed building", "failed to build", "build backend"),
        "there is only a source package and it doesn't build here: choose a version that has a wheel",
    ),
)


def causes(output: str, count: int = 6) -> list[str]:
    """Return the last lines that say what went wrong, without the installer's chatter."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not _NOISE.match(line)]
    # pip says it in passing, in a warning, and then complains of a version
    lines += re.findall(r"Failed to establish a new connection: [^'\")]+", output)[-1:]
    telling = [line for line in lines if _CAUSE.search(line) and not line.startswith("$ ")]
    return list(dict.fromkeys(telling or lines))[-count:]


def explain(what: str, rc: int, output: str, log: str) -> str:
    """Say why a command failed: its last causal lines and the remedy."""
    text = output.lower()
    remedy = next((r for signs, r in _REMEDIES if any(sign in text for sign in signs)), "")
    if rc == TIMED_OUT:
        remedy = "it ran out of time; a wheel folder on the host (wheel_dir) is faster than a slow index"
    elif rc > 128 and not remedy:
        remedy = f"it was ended by signal {rc - 128} (out of memory?): run again, it starts from the beginning"
    lines = "\n".join(f"  {line.strip()}" for line in causes(output))
    return f"{what} failed (rc {rc}):\n{lines}\n  log: {log}\nRemedy: {remedy or 'read the log and correct the cause'}"
