# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""Rendering a server's files on the controller: unit, environment, and the digest that ties them to a process."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from ansible_collections.gpufleet.sglang.plugins.module_utils._environment import DIGEST_VARIABLE

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class RenderError(Exception):
    """A template does not render; the message names the template and what is wrong."""


def environment_value(value: object) -> str:
    """Quote a value for an EnvironmentFile= line (systemd.exec(5): within double quotes these four are escaped)."""
    return '"' + re.sub(r'(["\\\\`$])', r"\\\1", str(value)) + '"'


def exec_start(argv: Sequence[object]) -> str:
    """Join argv to an ExecStart= line (systemd.service(5)): specifiers, variables and quotes stay literal."""
    words = []
    for raw in argv:
        text = str(raw).replace("%", "%%").replace("$", "$$")
        if not _PLAIN.fullmatch(text):
            text = '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        words.append(text)
    return " ".join(words)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render the template file with the variables; an undefined one is an error, not an empty string."""
    env = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["environment_value"] = environment_value
    env.filters["exec_start"] = exec_start
    try:
        return env.from_string(Path(template).read_text(encoding="utf-8")).render(**variables)
    except jinja2.TemplateError as exc:
        raise RenderError(f"{template}: {exc}") from exc


def digest(*texts: str) -> str:
    """Return a fingerprint of all the texts of one server."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def server_files(
    instance: Mapping[str, Any],
    unit_template: str,
    environment_template: str,
    variables: Mapping[str, Any],
    secrets: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], str, str]:
    """Render one server.

    Returns its files (path, content, mode), the text of its secrets file ("" when there are no
    secrets) and its digest. The digest is the last line of the environment file, so a running
    process carries the configuration it was started with.
    """
    merged = {**variables, "instance": instance, "secrets": bool(secrets)}
    unit = render(unit_template, merged)
    environment = render(environment_template, merged)
    secret_text = "".join(f"{name}={environment_value(value)}\n" for name, value in sorted(secrets.items()))
    fingerprint = digest(unit, environment, secret_text)
    environment += f"{DIGEST_VARIABLE}={fingerprint}\n"
    applied = json.dumps(dict(instance), indent=2, sort_keys=True) + "\n"
    environment_file = Path(instance["environment_file"])
    files = [
        {"path": str(instance["environment_file"]), "content": environment, "mode": "0600"},
        {"path": str(environment_file.parent / f"{instance['gpu']}.json"), "content": applied, "mode": "0600"},
        {"path": str(instance["unit_file"]), "content": unit, "mode": "0644"},
    ]
    return files, secret_text, fingerprint
