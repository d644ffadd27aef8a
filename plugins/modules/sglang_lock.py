#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Let one run at a time change the servers of a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_lock
short_description: Let one playbook run at a time change the servers of a host
version_added: 0.2.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - Takes, renews or gives back the lock that deploy, start, stop, rollback and remove work under.
  - A run that finds it held by another one fails and names the holder, since when and from where.
  - A dead holder's lock is taken over. The action plugin of the same name knows of runs on its own controller whether
    they are alive; a holder on another controller is dead after O(patience) seconds without a sign of life.
    Every stage, and every wait of M(gpufleet.sglang.sglang_health) and M(gpufleet.sglang.sglang_units), is one.
  - The lock is a file below C(/run), so a reboot ends it as it ends the work.
options:
  state:
    description:
      - V(held) takes or renews it, V(free) gives it back when it is this run's.
    type: str
    choices: [held, free]
    default: held
  what:
    description: What the run does, for the message that others get.
    type: str
    default: ''
  patience:
    description: Seconds without a sign of life after which a holder on another controller counts as dead.
    type: int
    default: 1800
  path:
    description: The lock's file.
    type: path
    default: /run/gpufleet-sglang.lock
  run:
    description: Filled in by the action plugin; the run's name, unlike any other.
    type: str
    default: ''
  who:
    description: Filled in by the action plugin; the user on the controller.
    type: str
    default: ''
  controller:
    description: Filled in by the action plugin; which controller, and which boot of it.
    type: str
    default: ''
  where:
    description: Filled in by the action plugin; the controller's name.
    type: str
    default: ''
  pid:
    description: Filled in by the action plugin; the run's process on the controller.
    type: int
    default: 0
  alive:
    description: Filled in by the action plugin; for the holder found, whether its process runs.
    type: dict
    default: {}
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Takes nothing; a lock that another run holds is a warning.
  diff_mode:
    support: none
    details: The lock is not part of the host's configuration, so taking it is no change.
"""

EXAMPLES = r"""
- name: Be the only one
  gpufleet.sglang.sglang_lock:
    what: deploy

- name: Let others
  gpufleet.sglang.sglang_lock:
    state: free
"""

RETURN = r"""
held:
  description: Whether this run holds the lock now.
  returned: success
  type: bool
holder:
  description: Who holds it, in the fields of the lock's file; empty when nobody does.
  returned: always
  type: dict
taken_over:
  description: Whose lock was taken over, in words; empty when nobody's.
  returned: success
  type: str
"""

import os
import time
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._hostlock import (
    PATH,
    Holder,
    LockHeldError,
    hold,
    look,
    refusal,
    release,
)

ARGUMENTS = {
    "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
    "what": {"type": "str", "default": ""},
    "patience": {"type": "int", "default": 1800},
    "path": {"type": "path", "default": PATH},
    "run": {"type": "str", "default": ""},
    "who": {"type": "str", "default": ""},
    "controller": {"type": "str", "default": ""},
    "where": {"type": "str", "default": ""},
    "pid": {"type": "int", "default": 0},
    "alive": {"type": "dict", "default": {}},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    path, patience = params["path"], params["patience"]
    origin = os.environ.get("SSH_CLIENT", "").split(" ")[0]
    where = f"{params['where']} ({origin})" if origin else params["where"]
    me = Holder(params["run"], params["who"], params["controller"], where, params["what"], 0.0, params["pid"])
    found, seen = look(path)
    holder = asdict(found) if found else {}
    if module.check_mode:
        if found is not None and found.run != me.run:
            module.warn(refusal(found, time.time(), seen, patience, path))
        module.exit_json(changed=False, held=False, holder=holder, taken_over="")
    try:
        if params["state"] == "free":
            release(me.run, path)
            module.exit_json(changed=False, held=False, holder={}, taken_over="")
        _new, before = hold(me, time.time(), params["alive"], float(patience), path)
    except LockHeldError as exc:
        module.fail_json(msg=str(exc), holder=holder)
    except OSError as exc:
        module.fail_json(msg=f"{path}: {exc.strerror}: run this as root (become)", holder=holder)
    module.exit_json(changed=False, held=True, holder=asdict(me), taken_over=before)


if __name__ == "__main__":
    main()
