#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Install, start, stop, restore and remove the units of a fleet."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_units
short_description: Install, start, stop, restore and remove the units of SGLang servers
version_added: 0.1.0
description:
  - Acts on many C(sglang@GPU.service) units of one host in one call, so that servers that belong together start
    together (C(systemctl restart --no-block A B C)).
  - Templates are rendered on the controller by the action plugin of the same name. Each environment file ends with a
    digest of everything rendered for that server (C(GPUFLEET_CONFIG)); a unit is restarted when the digest in its
    running process differs from the wanted one. A rollout that was cut off between writing and restarting is
    therefore finished by the next run.
  - Progress of anything that lasts is printed by the action plugin, which calls the module again with
    O(state=settled) until every job of systemd is done.
author:
  - gpufleet.sglang contributors (@gpufleet)
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
options:
  state:
    description:
      - V(started) installs the files and starts or restarts the units that are not running the wanted configuration.
        Without O(unit_template) nothing is rendered and units that do not run are started as they are.
      - V(drained) takes servers out of service, marks them in C(/run/gpufleet-sglang/draining), runs O(drain_command)
        and waits until they have no request, for O(drain_timeout) seconds at most. V(open) puts them back.
      - V(known_good) remembers the installed files as the ones to go back to, also for the release in use, and what the
        servers were started with. Call it after a health gate.
      - V(restored) kills the units, puts the files remembered by V(known_good) back and starts them; units that have
        none are stopped and disabled.
      - V(stopped) stops the units; each server first answers the requests it has.
      - V(absent) stops and disables the units and removes their files. With neither O(instances) nor O(units) the
        target goes too.
      - V(settled) is used by the action plugin between calls.
    type: str
    choices: [started, drained, open, known_good, restored, stopped, absent, settled]
    default: started
  instances:
    description:
      - The servers, as RV(gpufleet.sglang.sglang_plan#module:plan) lists them under C(instances).
      - When empty, those that an earlier deploy installed (C(GPU.json) in O(config_dir)).
    type: list
    elements: dict
    default: []
  units:
    description: Act on these units only. All of O(instances) when empty.
    type: list
    elements: str
    default: []
  unhealthy:
    description: Units to restart though their configuration is right, with the reason.
    type: dict
    default: {}
  from_release:
    description:
      - With O(state=started), take the files from the copies of this release, as they last answered, in place of the
        templates. RV(gpufleet.sglang.sglang_releases#module:release) names it.
    type: str
    default: ''
  drain_command:
    description:
      - Command to run for each server, with V(drain) or V(open) and its port added, C(SGLANG_GPU), C(SGLANG_PORT) and
        C(SGLANG_UNIT) in its environment. For a load balancer that doesn't read the marks.
    type: list
    elements: str
    default: []
  drain_grace:
    description: Seconds that a client may need to see a mark.
    type: float
    default: 2.0
  drain_timeout:
    description: Seconds to wait for requests, after which the engine's own stop waits for the rest.
    type: int
    default: 120
  config_dir:
    description: Folder of the environment files and known-good copies.
    type: path
    default: /etc/sglang
  target:
    description: Name of the target that all the units belong to.
    type: str
    default: sglang.target
  unit_template:
    description: Template of the unit, looked for like the source of M(ansible.builtin.template).
    type: str
  environment_template:
    description: Template of the environment file.
    type: str
  target_template:
    description: Template of the target.
    type: str
  variables:
    description: Variables of the templates, beside C(instance).
    type: dict
    default: {}
  secret_environment:
    description: Variables for an environment file of their own (mode 0600), never shown.
    type: dict
    default: {}
  settle_timeout:
    description: Seconds to wait for systemd to finish its jobs; a stop drains requests.
    type: int
    default: 420
  stall_timeout:
    description:
      - Seconds without a token, and without a request less, after which a server is waited for no longer when it is
        taken out of service, and killed when it is being stopped. A server that compiles a kernel counts as at work.
    type: int
    default: 60
  rendered:
    description: Filled in by the action plugin; files and digest by unit.
    type: dict
    default: {}
  rendered_secrets:
    description: Filled in by the action plugin; text of the secrets file by unit.
    type: dict
    default: {}
  before:
    description: Filled in by the action plugin; InvocationID by unit before the jobs were queued.
    type: dict
    default: {}
  actions:
    description: Filled in by the action plugin; the action by unit.
    type: dict
    default: {}
  stalled:
    description: Filled in by the action plugin; units that are being stopped and have stood still for too long.
    type: list
    elements: str
    default: []
  begun:
    description: Filled in by the action plugin; seconds since O(state=drained) began.
    type: float
    default: 0.0
  slice_seconds:
    description: Filled in by the action plugin; seconds that O(state=settled) and O(state=drained) may take.
    type: float
    default: 5.0
"""

EXAMPLES = r"""
- name: Start GPU 0
  gpufleet.sglang.sglang_units:
    instances: "{{ plan.plan.instances }}"
    units: [sglang@0.service]
    unit_template: sglang@.service.j2
    environment_template: sglang.env.j2
    target_template: sglang.target.j2
    variables:
      user: sglang

- name: Stop everything, requests are answered first
  gpufleet.sglang.sglang_units:
    instances: "{{ plan.plan.instances }}"
    state: stopped
"""

RETURN = r"""
units:
  description: What happened to each unit, or would in check mode.
  returned: success
  type: list
  elements: dict
  contains:
    unit:
      description: Name of the unit.
      type: str
    gpu:
      description: GPU or slot.
      type: int
    action:
      description: V(none), V(start), V(restart) or V(stop).
      type: str
    reason:
      description: Why.
      type: str
files:
  description: Paths that were written or removed.
  returned: success
  type: list
  elements: str
enabled:
  description: Units that were enabled.
  returned: success
  type: list
  elements: str
restored:
  description: Units that went back to their known good configuration.
  returned: success
  type: list
  elements: str
disabled:
  description: Units that were disabled.
  returned: success
  type: list
  elements: str
before:
  description: InvocationID by unit before this call.
  returned: success
  type: dict
requests:
  description: Requests in flight by unit; V(null) where the engine does not tell.
  returned: when O(state=drained)
  type: dict
signs:
  description: What tells of progress, by unit; the action plugin compares one call with the next.
  returned: when O(state=drained) or O(state=settled)
  type: dict
drained:
  description: Whether waiting is over.
  returned: when O(state=drained)
  type: bool
invocations:
  description: InvocationID by unit of the start that this call made.
  returned: when units were started
  type: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._drain import DrainError, take_out_or_in
from ansible_collections.gpufleet.sglang.plugins.module_utils._files import FileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._hostlock import sign_of_life
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import (
    PlanFileError,
    instance_from_dict,
    read_applied,
)
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import SystemdError
from ansible_collections.gpufleet.sglang.plugins.module_utils._units import Fleet, UnitsError
from ansible_collections.gpufleet.sglang.plugins.module_utils._units_result import (
    outcome_result,
    servers_from,
    servers_of_release,
    shared_files,
    wait_settled,
)

ARGUMENT_SPEC = {
    "state": {
        "type": "str",
        "choices": ["started", "drained", "open", "known_good", "restored", "stopped", "absent", "settled"],
        "default": "started",
    },
    "instances": {"type": "list", "elements": "dict", "default": []},
    "units": {"type": "list", "elements": "str", "default": []},
    "unhealthy": {"type": "dict", "default": {}},
    "from_release": {"type": "str", "default": ""},
    "drain_command": {"type": "list", "elements": "str", "default": []},
    "drain_grace": {"type": "float", "default": 2.0},
    "drain_timeout": {"type": "int", "default": 120},
    "config_dir": {"type": "path", "default": "/etc/sglang"},
    "target": {"type": "str", "default": "sglang.target"},
    "unit_template": {"type": "str"},
    "environment_template": {"type": "str"},
    "target_template": {"type": "str"},
    "variables": {"type": "dict", "default": {}},
    "secret_environment": {"type": "dict", "default": {}, "no_log": True},
    "settle_timeout": {"type": "int", "default": 420},
    "rendered": {"type": "dict", "default": {}},
    "rendered_secrets": {"type": "dict", "default": {}, "no_log": True},
    "stall_timeout": {"type": "int", "default": 60},
    "before": {"type": "dict", "default": {}},
    "actions": {"type": "dict", "default": {}},
    "stalled": {"type": "list", "elements": "str", "default": []},
    "begun": {"type": "float", "default": 0.0},
    "slice_seconds": {"type": "float", "default": 5.0},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params = module.params
    fleet = Fleet(SubprocessRunner(), params["config_dir"], params["target"], module.check_mode)
    try:
        instances = [instance_from_dict(item) for item in params["instances"]]
        whole = not instances and not params["units"]
        instances = instances or list(read_applied(params["config_dir"]).values())
        if params["from_release"]:
            servers = servers_of_release(params["config_dir"], params["from_release"], params["units"])
        else:
            servers = servers_from(
                instances, params["units"], params["rendered"], params["rendered_secrets"], params["config_dir"]
            )
        if params["state"] == "settled":
            fleet.give_up(params["stalled"])
            result = wait_settled(
                fleet,
                instances,
                params["before"],
                params["actions"],
                params["slice_seconds"],
                time.monotonic,
                time.sleep,
            )
            sign_of_life()
            module.exit_json(changed=False, **result)
        if params["state"] in ("drained", "open"):
            module.exit_json(**take_out_or_in(SubprocessRunner(), params, servers, module.check_mode))
        shared = shared_files(params["rendered"])
        outcome = {
            "started": lambda: fleet.start(servers, shared, params["unhealthy"]),
            "known_good": lambda: fleet.keep(servers),
            "restored": lambda: fleet.restore(servers),
            "stopped": lambda: fleet.stop([server.unit for server in servers]),
            "absent": lambda: fleet.remove(servers, whole),
        }[params["state"]]()
    except (DrainError, FileError, PlanFileError, SystemdError, UnitsError) as exc:
        module.fail_json(msg=str(exc))
    module.exit_json(**outcome_result(outcome, servers))


if __name__ == "__main__":
    main()
