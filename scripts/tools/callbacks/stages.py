"""Where the time of a playbook goes: seconds per stage, by tag or by words of the task's name, as a JSON file."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: stages
type: aggregate
short_description: Seconds per stage of a deploy
description: Writes them to the file named by GPUFLEET_STAGES.
"""

STAGES = ("preflight", "engine", "toolkit", "cccl", "plan", "jit", "canary", "fleet", "health")


class CallbackModule(CallbackBase):
    """Sum the time between task starts under the stage that the task belongs to."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "stages"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.stage, self.since = "start", time.monotonic()

    def _switch(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002
        """Book the previous task, start this one."""
        tags = [tag for tag in task.tags if tag in STAGES]
        # Batches are included files: their own first task says which batch it is
        if tags and (len(tags) == 1 or self.stage not in tags):
            self._switch(tags[0])

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002
        """Write the file."""
        self._switch("end")
        path = os.environ.get("GPUFLEET_STAGES")
        if path:
            with open(path, "w", encoding="utf-8") as handle:
                json.dump({key: round(value, 1) for key, value in self.seconds.items()}, handle)
