"""Causes of failure, provoked for real: units beside the fleet's own, with the real engine or its own libraries."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

PORT = 31000
UNIT = """[Service]
Type=exec
User=sglang
WorkingDirectory=/var/lib/sglang
EnvironmentFile=/etc/sglang/cause{number}.env
ExecStart={command}
KillMode=mixed
MemoryAccounting=yes
{lines}
"""
NINJA = "import tvm_ffi.cpp; tvm_ffi.cpp.load_inline('x', cpp_sources='int f(int a){return a;}', functions='f')"
CACHE = "from triton.runtime.cache import FileCacheManager as F; F('ab12').put(b'x' * 9000, 'kernel.cubin')"


@dataclass(frozen=True)
class Cause:
    """One cause: what is changed against a server that works, and what is done to it."""

    name: str
    code: str
    said: str  # in the evidence
    args: dict[str, str | None] = field(default_factory=dict)  # flag: value; None takes the flag away
    environment: dict[str, str] = field(default_factory=dict)
    lines: str = ""  # of the unit
    before: str = ""  # shell commands on the host
    after: tuple[str, str] = ("", "")  # (line to wait for in the journal, shell command); {group} = its cgroup
    script: str = ""  # Python run by the engine's interpreter in place of the server


def kill(title: str) -> str:
    """A command that kills the process with this title in the unit, and no other."""
    return f"for p in $(cat {{group}}/cgroup.procs); do grep -q {title} /proc/$p/cmdline && kill -KILL $p; done; true"


MAIN = "kill -KILL $(systemctl show -p MainPID --value {unit})"
READY = "fired up and ready"
# Groups start together. "quick" is in every run of CI, on the host of molecule/default; the others in make test-all.
CAUSES = {
    "quick": [
        Cause("wrong flag", "unit_misconfigured", "attention-backend", {"--attention-backend": "nope"}),
        Cause("missing model", "model_unavailable", "/srv/nope", {"--model-path": "/srv/nope"}),
        Cause("ninja missing", "build_tools_missing", "[Nn]inja", environment={"PATH": "/usr/bin:/bin"}, script=NINJA),
        Cause(
            "cache not writable",
            "jit_cache_not_writable",
            "/srv/readonly",
            environment={"TRITON_CACHE_DIR": "/srv/readonly/triton"},
            before="mkdir -p /srv/readonly",
            script=CACHE,
        ),
        Cause(
            "disk full",
            "disk_full",
            "No space left",
            environment={"TRITON_CACHE_DIR": "/srv/full/triton"},
            before="mkdir -p /srv/full; mount -t tmpfs -o size=64k,mode=1777 tmpfs /srv/full;"
            " mkdir -m 1777 /srv/full/triton; dd if=/dev/zero of=/srv/full/fill bs=1k 2>/dev/null; true",
            script=CACHE,
        ),
    ],
    "model": [
        Cause(
            "damaged weights",
            "weights_corrupt",
            "[Ss]afetensor|Header|Incomplete",
            {"--model-path": "/srv/damaged"},
            before="cp -r /srv/models/tiny /srv/damaged; truncate -s 1000 /srv/damaged/model.safetensors",
        ),
        Cause("hub offline", "model_unavailable", "offline|LocalEntry|connect", {"--model-path": "someone/some-model"}),
        Cause(
            "no weights",
            "model_unavailable",
            "Cannot find any model weights",
            {"--model-path": "/srv/weightless"},
            before="cp -r /srv/models/tiny /srv/weightless; rm -f /srv/weightless/*.safetensors*",
        ),
    ],
    "ports": [
        Cause(
            "killed while loading",
            "process_killed",
            "killed",
            after=("server_args=", MAIN),
        ),
        Cause(
            "port of a stranger",
            "port_in_use",
            "squatter",
            before="systemd-run -q --unit=squatter python3 -m http.server --bind 127.0.0.1 {port}",
        ),
        Cause("port of another SGLang", "port_in_use", "30000|sglang@0", {"--port": "30000"}),
    ],
    # alone: a control group at its limit reads its pages again and again, and slows the others' start and our looks
    "memory": [
        Cause(
            "out of memory in its cgroup",
            "host_oom",
            "oom|OOM|memory",
            lines="MemoryMax=900M\nMemoryLimit=900M\nMemorySwapMax=0",
        ),
    ],
    "killed": [
        Cause("scheduler killed", "process_killed", "scheduler|signal 9", after=(READY, kill("scheduler"))),
        Cause("detokenizer killed", "process_killed", "detokenizer|signal 9", after=(READY, kill("detokenizer"))),
        # keeps the gate open until the others were killed
        Cause("companion", "process_killed", "killed", after=("Started", MAIN), script="import time; time.sleep(900)"),
    ],
}


class Bench:
    """Starts causes on a host and asks sglang_health about them."""

    def __init__(self, fleet, folder) -> None:
        self.fleet, self.folder, self.begun = fleet, folder, 0.0
        plan = json.loads(fleet.sh("cat /etc/sglang/plan.json"))
        self.argv = plan["instances"][0]["argv"]
        self.environment = plan["instances"][0]["environment"]

    def instance(self, cause: Cause, number: int) -> dict:
        """The server as the module wants it."""
        words = dict(zip(self.argv[3::2], self.argv[4::2], strict=False))
        words = {key: value for key, value in words.items() if key.startswith("--")}
        words.pop("--sleep-on-idle", None)
        port = str(PORT + number)
        wanted = {**words, "--port": port, **cause.args}
        argv = [
            *self.argv[:3],
            *(word for key, value in wanted.items() if value is not None for word in (key, value) if word),
        ]
        if cause.script:
            argv = [self.argv[0], "-c", cause.script]
        return {
            "gpu": number,
            "unit": f"cause{number}.service",
            "port": int(wanted["--port"]),
            "argv": argv,
            "environment": {**self.environment, **cause.environment},
        }

    def start(self, causes: list[Cause], first: int) -> list[dict]:
        """Write the units and start them together."""
        self.begun = time.time() - 1  # lines of an earlier run are not this one's
        instances = [self.instance(cause, first + at) for at, cause in enumerate(causes)]
        script = []
        for cause, item in zip(causes, instances, strict=True):
            number = item["gpu"]
            command = " ".join('"' + word.replace('"', '\\"').replace("%", "%%") + '"' for word in item["argv"])
            unit = UNIT.format(number=number, command=command, lines=cause.lines)
            env = "".join(f'{key}="{value}"\n' for key, value in item["environment"].items())
            script += [
                cause.before.format(port=item["port"]) if "{port}" in cause.before else cause.before,
                f"cat > /etc/systemd/system/cause{number}.service <<'X'\n{unit}\nX",
                f"cat > /etc/sglang/cause{number}.env <<'X'\n{env}\nX",
            ]
        names = " ".join(item["unit"] for item in instances)
        script += ["systemctl daemon-reload", f"systemctl start --no-block {names}"]
        self.fleet.sh("\n".join(line for line in script if line))
        return instances

    def health(self, instances: list[dict]):
        """Start waiting for all of them; the play's lines carry the time each was named."""
        play = [
            {
                "hosts": self.fleet.host,
                "gather_facts": False,
                "tasks": [
                    {
                        "gpufleet.sglang.sglang_health": {
                            "instances": instances,
                            "wait": True,
                            "timeout": 400,
                            "progress_timeout": 300,
                        },
                        "register": "health",
                        "ignore_errors": True,
                    },
                    {"ansible.builtin.copy": {"content": "{{ health | to_json }}", "dest": "/srv/health.json"}},
                ],
            }
        ]
        path = self.folder / "causes.yml"
        path.write_text(json.dumps(play))
        return self.fleet.launch(str(path))

    def act(self, cause: Cause, item: dict) -> None:
        """Do to a running server what the cause wants done."""
        line, command = cause.after
        if not command:
            return
        unit = item["unit"]
        said = f"journalctl -u {unit} --since=@{self.begun:.0f} -o cat --no-pager | grep -q {line!r}"
        self.fleet.wait(lambda: self.fleet.sh(f"{said} && echo yes; true").strip(), 300, f"{cause.name}: {line}")
        time.sleep(1.5)
        group = self.fleet.sh(
            f"g=$(systemctl show -p ControlGroup --value {unit});"
            " for r in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified;"
            " do [ -e $r$g/cgroup.procs ] && echo $r$g && break; done; true"
        ).strip()
        self.fleet.sh(command.replace("{group}", group).replace("{unit}", unit))

    def died(self, unit: str, since: float) -> float | None:
        """When the main process ended, or said that it cannot have its port; None while it still tries."""
        found = [
            int(entry["__REALTIME_TIMESTAMP"]) / 1e6
            for entry in self.fleet.journal(unit, f"--since=@{since - 30:.0f}")
            if re.search("Main process exited|error while attempting to bind", str(entry.get("MESSAGE")))
        ]
        return min(found, default=None)

    def clean(self) -> None:
        """Take everything away again."""
        self.fleet.sh(
            "systemctl kill -s KILL 'cause*'; systemctl stop 'cause*' squatter 2>/dev/null;"
            " umount /srv/full 2>/dev/null;"
            " rm -rf /etc/systemd/system/cause*.service /etc/sglang/cause*.env"
            " /srv/weightless /srv/damaged /srv/readonly /srv/full;"
            " systemctl daemon-reload; systemctl reset-failed; true",
            rc=None,
            timeout=120,
        )
