#!/usr/bin/python
# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Wait for SGLang servers, or look at them once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_health
short_description: Wait until SGLang servers answer, or look at them once
version_added: 0.1.0
author:
  - gpufleet.sglang contributors (@gpufleet)
description:
  - A server is ready when its unit is active, one of the unit's own processes listens on its port, it says that it
    is ready (C(/ready) where the engine has it, else C(/health)), and a real request came back with tokens.
  - Many servers are watched at the same time. Each has its own deadline, which moves on with progress - a phase
    change or any other line in the journal, CPU time, a running compiler - and a unit that died, or could not have
    its port, ends its wait at once.
  - While it waits, a line is printed for every phase change of every server.
options:
  plan:
    description:
      - File with the plan of this host, as M(gpufleet.sglang.sglang_plan) writes it.
      - A server that was rendered is looked for where it was rendered last (C(GPU.json) beside the plan), which differs
        from the plan after a rollout that went back.
    type: path
    default: /etc/sglang/plan.json
  instances:
    description:
      - The servers, in place of those of O(plan).
      - Each is a dictionary like those in the plan's file; only C(gpu), C(unit) and C(port) are needed.
    type: list
    elements: dict
  units:
    description: Only these units; C(.service) may be left out.
    type: list
    elements: str
  wait:
    description:
      - Wait until every server is ready or cannot become so, and fail if one is not ready.
      - Otherwise look once and never fail.
    type: bool
    default: false
  progress_timeout:
    description: Seconds without any progress after which a server counts as stalled.
    type: int
    default: 600
  timeout:
    description: Seconds after which waiting ends, progress or not.
    type: int
    default: 5400
  invocations:
    description:
      - Unit names and the InvocationID with which the caller started them.
      - A unit that runs under another one has died in between.
    type: dict
    default: {}
  probe:
    description: The request that must come back with tokens.
    type: dict
    default: {}
    suboptions:
      prompt:
        description: Text to continue.
        type: str
        default: The capital of France is
      max_tokens:
        description: Tokens to ask for.
        type: int
        default: 16
      expect:
        description: Regular expression that the greedy answer must match.
        type: str
      chat_tokens:
        description:
          - Also ask a chat for at most so many tokens; its content must not end up in C(reasoning_content).
        type: int
        default: 0
      timeout:
        description: Seconds for the whole answer.
        type: int
        default: 30
      api_key:
        description: Key to send, for servers that want one.
        type: str
  retry_transient:
    description:
      - Restart a server once, one after the other, when its diagnosis is one for which that helps
        (RV(servers[].diagnosis.retry=auto)); nothing else is ever tried again.
      - Done by the action plugin, and only with O(wait=true).
    type: bool
    default: false
  slice_seconds:
    description:
      - Internal. The action plugin asks for slices of this length and goes on with O(watch_state).
      - Without it a single call waits as long as it takes.
    type: float
  watch_state:
    description: Internal. What a slice returned as RV(watch_state).
    type: dict
extends_documentation_fragment:
  - gpufleet.sglang.attributes
attributes:
  check_mode:
    support: full
    details: Looks once, waits for nothing and never fails.
  diff_mode:
    support: none
    details: Nothing is changed.
  platform:
    platforms: linux
seealso:
  - module: gpufleet.sglang.sglang_report
"""

EXAMPLES = r"""
- name: See how the servers of this host are
  gpufleet.sglang.sglang_health:
  register: health

- name: Wait for one server
  gpufleet.sglang.sglang_health:
    units: [sglang@0]
    wait: true
    progress_timeout: 300
    probe:
      prompt: The sky is
      max_tokens: 8
"""

RETURN = r"""
servers:
  description: One dictionary per server, in the plan's order.
  returned: always
  type: list
  elements: dict
  contains:
    gpu:
      description: Index of the GPU, or number of the slot on device cpu.
      type: int
    uuid:
      description: UUID of the GPU.
      type: str
    canary:
      description: Whether the plan starts this server first.
      type: bool
    unit:
      description: Name of the unit.
      type: str
    host:
      description: Name of the host in the inventory.
      type: str
    port:
      description: Port of the server.
      type: int
    url:
      description: Where the host itself reaches the server.
      type: str
    state:
      description:
        - V(absent) no such unit. V(stopped) not running. V(starting) on its way. V(ready) answered a request.
        - V(unhealthy) runs and listens, but gives no good answer. V(failed) died, or could not have its port.
        - V(foreign) another process has its port. V(stalled) no progress in time.
      type: str
    phase:
      description: The last one reached of none, process, weights, kv_pool, graphs, warmup and ready.
      type: str
    phases:
      description: When each phase was reached, in seconds since the unit started.
      type: dict
    reason:
      description: Why it is not ready, in one line; empty when it is.
      type: str
    seconds:
      description: Time since the unit started, or how long it ran.
      type: float
    seconds_to_ready:
      description: Time from the start of the unit to the engine's ready line; null when the journal has lost it.
      type: float
    model:
      description: Name of the served model.
      type: str
    version:
      description: Version of SGLang.
      type: str
    kv_tokens:
      description: Tokens that the KV pool holds.
      type: int
    max_running_requests:
      description: Requests that really run at the same time.
      type: int
    first_token_seconds:
      description: Time to the first token of the probe.
      type: float
    decode_tokens_per_second:
      description: Rate of the probe after its first token.
      type: float
    completion_tokens:
      description: Tokens of the probe's answer.
      type: int
    text:
      description: The probe's answer, its beginning.
      type: str
    result:
      description: Result of the unit, as systemd calls it.
      type: str
    exit_code:
      description: How the main process ended - exited, killed or dumped; empty when it did not.
      type: str
    exit_status:
      description: Its exit status, or the number of the signal.
      type: int
    error_lines:
      description: The log lines that say why, the most telling first.
      type: list
      elements: str
    diagnosis:
      description: Why it is not well; null for a server that is.
      type: dict
      contains:
        code:
          description: Stable name of the cause, V(unknown_failure) when nothing fits.
          type: str
        detail:
          description: Finer name of the cause, which may change between versions.
          type: str
        severity:
          description: One of V(hardware), V(fatal), V(transient), V(degraded), V(warning) and V(info).
          type: str
        retry:
          description: Whether trying again helps - V(no), V(once), V(after_remedy), or V(auto) where the gate does it.
          type: str
        says:
          description: The cause in a few words.
          type: str
        evidence:
          description: Lines of the log and facts of the host that show it.
          type: list
          elements: str
        remedy:
          description: What to change, in the installed engine's flags.
          type: str
        also_seen:
          description: Other causes that there were signs of.
          type: list
          elements: str
        phase:
          description: How far the server had come.
          type: str
    remedy:
      description: The value that a remedy changed for this GPU, in one line; null when there is none.
      type: str
    drift:
      description:
        - What the running process has otherwise than the plan's file asks for, one line each - item, running value and
          planned one; secrets are hidden. Empty when it is as planned.
        - V(null) when nothing runs, or when servers were waited for or given with O(instances).
      type: list
      elements: str
    retried:
      description: The code for which the server was started once more; only there when it was.
      type: str
    invocation_id:
      description: The invocation that was judged.
      type: str
    main_pid:
      description: Main process of the unit.
      type: int
    restarts:
      description: How often systemd restarted the unit by itself.
      type: int
msg:
  description: What is wrong, or why there are no servers.
  returned: when there is something to say
  type: str
done:
  description: Internal. Whether nothing is left to wait for.
  returned: when O(wait=true)
  type: bool
watch_state:
  description: Internal. To be handed to the next slice.
  returned: when O(slice_seconds) is set
  type: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufleet.sglang.plugins.module_utils._drift import look_for_drift
from ansible_collections.gpufleet.sglang.plugins.module_utils._facts import on_its_gpu
from ansible_collections.gpufleet.sglang.plugins.module_utils._health import Limits, failure_message
from ansible_collections.gpufleet.sglang.plugins.module_utils._hostlock import sign_of_life
from ansible_collections.gpufleet.sglang.plugins.module_utils._instance import PlanFileError
from ansible_collections.gpufleet.sglang.plugins.module_utils._journal import ProcessLines
from ansible_collections.gpufleet.sglang.plugins.module_utils._probe import ProbeOptions
from ansible_collections.gpufleet.sglang.plugins.module_utils._remedies import read
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._select import select
from ansible_collections.gpufleet.sglang.plugins.module_utils._systemd import SystemdError
from ansible_collections.gpufleet.sglang.plugins.module_utils._watch import Watch, make_host
from ansible_collections.gpufleet.sglang.plugins.module_utils._why import Explainer

PROBE = {
    "prompt": {"type": "str", "default": ProbeOptions.prompt},
    "max_tokens": {"type": "int", "default": ProbeOptions.max_tokens, "no_log": False},
    "timeout": {"type": "int", "default": int(ProbeOptions.timeout)},
    "api_key": {"type": "str", "no_log": True},
    "expect": {"type": "str"},
    "chat_tokens": {"type": "int", "default": 0, "no_log": False},
}
ARGUMENTS = {
    "plan": {"type": "path", "default": "/etc/sglang/plan.json"},
    "instances": {"type": "list", "elements": "dict"},
    "units": {"type": "list", "elements": "str"},
    "wait": {"type": "bool", "default": False},
    "progress_timeout": {"type": "int", "default": 600},
    "timeout": {"type": "int", "default": 5400},
    "invocations": {"type": "dict", "default": {}},
    "probe": {"type": "dict", "default": {}, "options": PROBE, "apply_defaults": True},
    "retry_transient": {"type": "bool", "default": False},
    "slice_seconds": {"type": "float"},
    "watch_state": {"type": "dict"},
}


def main() -> None:
    """Build, look, tell."""
    # no_log here only keeps the invocation out of the host's log: watch_state would fill it
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, no_log=True)
    params = module.params
    waits = params["wait"] and not module.check_mode
    probe = params["probe"]
    options = ProbeOptions(
        probe["prompt"],
        probe["max_tokens"],
        float(probe["timeout"]),
        probe["api_key"] or "",
        probe["expect"] or "",
        probe["chat_tokens"],
    )
    state = params["watch_state"] or {}
    try:
        chosen = select(params["plan"], params["instances"], params["units"])
        watch = Watch(
            make_host(SubprocessRunner(), ProcessLines(), options, state),
            chosen.instances,
            chosen.host,
            params["invocations"],
            state,
            Explainer(SubprocessRunner(), ProcessLines(), str(Path(params["plan"]).parent)),
            lambda instances: on_its_gpu(SubprocessRunner(), instances),
        )
        if waits:
            sign_of_life()
            limits = Limits(params["progress_timeout"], params["timeout"])
            outcome = watch.wait(limits, params["slice_seconds"], options.timeout + 30)
        else:
            outcome = watch.once(options.timeout + 15)
    except (PlanFileError, SystemdError) as exc:
        if waits:
            module.fail_json(msg=str(exc), servers=[])
        module.exit_json(changed=False, servers=[], msg=str(exc))
    remedies = read(str(Path(params["plan"]).parent))
    drift = {} if waits or params["instances"] is not None else look_for_drift(SubprocessRunner(), params["plan"])
    for server in outcome.servers:
        server["drift"] = drift.get(server["unit"])
        server["remedy"] = remedies[server["gpu"]].text() if server["gpu"] in remedies else None
    result = {"changed": False, "servers": outcome.servers}
    if chosen.message:
        result["msg"] = chosen.message
    if waits:
        result["done"] = outcome.done
    if params["slice_seconds"] is not None:
        result["watch_state"] = outcome.state
    elif waits and any(server["state"] != "ready" for server in outcome.servers):
        module.fail_json(**{**result, "msg": failure_message(outcome.servers)})
    module.exit_json(**result)


if __name__ == "__main__":
    main()
