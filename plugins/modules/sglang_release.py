#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make a release of SGLang, or verify an existing venv."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_release
short_description: Make a release of SGLang - a venv with locked versions
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Makes a I(release), a virtual environment with exact versions in its own folder below O(releases_dir).
    Several releases lie side by side, and one is chosen by its name.
  - Installs from the package registries, or from a folder of wheels on the host without any network,
    or takes a venv that is there already and only verifies it.
  - A release that was interrupted never looks finished. Its record C(gpufleet-release.json) is written last,
    and the next run removes the unfinished folder and starts again.
  - A complete release is immutable, because servers may be running from it.
    Other versions need another name.
  - Reads the engine's option list once per release and keeps it in O(options_dir), for M(gpufleet.sglang.sglang_plan).
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details:
      - What would stop the installation on this host (no Python, no wheel folder, no space) is a warning in check mode,
        so that an empty host can be looked at.
  diff_mode:
    support: full
requirements:
  - Python 3.11 or newer on the host for the venv, with C(ensurepip)
    (on Debian and Ubuntu the package C(python3-venv)) unless C(uv) is there
options:
  name:
    description:
      - The release's name, and its folder's below O(releases_dir).
      - By default the version, or the name of the folder of O(venv).
    type: str
  releases_dir:
    description: The folder that holds the releases.
    type: path
    default: /opt/sglang/releases
  venv:
    description:
      - An existing venv. Nothing is installed in it.
      - It is verified to hold SGLang, and what O(lock) says when one is given.
    type: path
  python:
    description:
      - The interpreter to make the venv with, a name or a path.
      - By default the first of C(python3.12), C(python3.11) and C(python3) that runs, is new enough,
        and that the wheels in O(wheel_dir) are for.
    type: str
  version:
    description:
      - The version of SGLang. Without a O(lock), this version is installed together with what it resolves to.
      - With a O(lock) or a O(venv) it only has to agree with what they hold.
    type: str
  requirements:
    description:
      - More requirements, one line each, resolved together with SGLang. Not with a O(lock), which is complete.
    type: list
    elements: str
    default: []
  lock:
    description:
      - The text of a lock file with one exact pin per line (C(name==version)), with or without hashes,
        as C(uv pip compile) and C(pip freeze) write it.
      - Exactly these packages are installed, without resolving, and afterwards compared with what is there.
    type: str
  wheel_dir:
    description: A folder of wheels on the host. Nothing is fetched from anywhere else.
    type: path
  index_url:
    description: The package index to use instead of the installer's own. It may hold a user and a password.
    type: str
  extra_index_urls:
    description: More package indexes. The best version of all of them is taken.
    type: list
    elements: str
    default: []
  installer:
    description:
      - V(auto) takes C(uv) where it runs, unless pip's configuration says where packages come from,
        which C(uv) does not read, and neither O(wheel_dir) nor O(index_url) is given. Else it takes C(pip).
    type: str
    choices: [auto, uv, pip]
    default: auto
  options_dir:
    description: The folder for the cached option list, C(options-<name>.json).
    type: path
    default: /etc/sglang
  device:
    description: What the engine will run on. It decides how the engine is imported and how much space is asked for.
    type: str
    choices: [cuda, cpu]
    default: cuda
  read_options:
    description:
      - Whether to read the engine's option list where it is not cached. That imports the engine, which takes seconds.
      - With V(false), RV(options_due) says that a later call has to do it.
    type: bool
    default: true
seealso:
  - module: gpufleet.sglang.sglang_plan
"""

EXAMPLES = r"""
- name: A release from the registries, resolved today
  gpufleet.sglang.sglang_release:
    version: 0.5.23

- name: The same on a host without network, from a lock and a folder of wheels
  gpufleet.sglang.sglang_release:
    name: 0.5.23-r2
    lock: "{{ lookup('ansible.builtin.file', 'sglang-0.5.23.txt') }}"
    wheel_dir: /srv/wheels

- name: A venv that is there already
  gpufleet.sglang.sglang_release:
    venv: /opt/my-sglang
"""

RETURN = r"""
release:
  description: The release, as the plan holds it.
  returned: success
  type: dict
  contains:
    name:
      description: The name.
      type: str
      sample: 0.5.23
    venv:
      description: The folder of the venv.
      type: str
      sample: /opt/sglang/releases/0.5.23
    python:
      description: The venv's interpreter.
      type: str
      sample: /opt/sglang/releases/0.5.23/bin/python
    version:
      description: The installed version of SGLang. Empty in check mode when it is not installed yet.
      type: str
      sample: 0.5.23
expected_version:
  description: The version of SGLang that is, or in check mode would be, installed.
  returned: success
  type: str
  sample: 0.5.23
packages:
  description:
    - The packages that matter for a server (the engine, torch, kernels, the CUDA toolkit's parts) and their versions.
  returned: success
  type: dict
  sample: {sglang: 0.5.23, torch: 2.14.1}
options_file:
  description: The cached option list.
  returned: success
  type: str
  sample: /etc/sglang/options-0.5.23.json
options_due:
  description: Whether the engine's option list is still to be read, because O(read_options=false).
  returned: success
  type: bool
  sample: false
installer:
  description: What installed the release, C(pip) or C(uv). Empty for an existing venv.
  returned: success
  type: str
  sample: uv
log:
  description: The installer's output. Empty for an existing venv.
  returned: always
  type: str
  sample: /opt/sglang/releases/0.5.23.log
seconds:
  description: How long the installation took. 0 when nothing was installed.
  returned: success
  type: float
  sample: 85.2
system_packages:
  description:
    - System packages that have to be installed before this release can be made.
    - Filled in check mode, on Debian and its family.
  returned: success
  type: list
  elements: str
  sample: [python3-venv]
problems:
  description: All reasons why the release can't be made or used.
  returned: failure
  type: list
  elements: str
"""

import platform

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._release import ReleaseError, Spec
from ansible_collections.gpufleet.sglang.plugins.module_utils._release_build import Tools, ensure
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner

ARGUMENTS = {
    "name": {"type": "str"},
    "releases_dir": {"type": "path", "default": "/opt/sglang/releases"},
    "venv": {"type": "path"},
    "python": {"type": "str"},
    "version": {"type": "str"},
    "requirements": {"type": "list", "elements": "str", "default": []},
    "lock": {"type": "str"},
    "wheel_dir": {"type": "path"},
    "index_url": {"type": "str", "no_log": True},
    "extra_index_urls": {"type": "list", "elements": "str", "default": [], "no_log": True},
    "installer": {"type": "str", "choices": ["auto", "uv", "pip"], "default": "auto"},
    "options_dir": {"type": "path", "default": "/etc/sglang"},
    "device": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
    "read_options": {"type": "bool", "default": True},
}


def main() -> None:
    """Build, call, exit."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    values = {key: value for key, value in module.params.items() if value is not None}
    for key in ("requirements", "extra_index_urls"):
        values[key] = tuple(values[key])
    spec = Spec(**values)
    try:
        outcome = ensure(spec, Tools(SubprocessRunner()), check=module.check_mode)
    except ReleaseError as exc:
        module.fail_json(msg=f"{platform.node()}: {exc}", problems=exc.problems, log=exc.log)
    for warning in outcome.warnings:
        module.warn(f"{platform.node()}: the installation would stop: {warning}")
    module.exit_json(**outcome.to_dict())


if __name__ == "__main__":
    main()
