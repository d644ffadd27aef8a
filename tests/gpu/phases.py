"""The phases of the GPU proof, in the order in which they are worth the machine's time."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import kit
import models
from box import Box, Compilers, Played, answers, ask, kernels, wait_for_answer
from figures import built, compiled_since_start, memory, units

FLAGS = {
    "load-format": "dummy", "attention-backend": "flashinfer", "sampling-backend": "flashinfer",
    "chunked-prefill-size": "4096", "max-running-requests": "64",
}  # fmt: skip
FRACTION_SHARED, FRACTION_OWN = 0.1, 0.6
NAIVE_PORT = 31000
STRATEGIES = ("no_buffer", "extra_buffer")
MORE = (Box("c1", 30010), Box("c2", 30020))
# NVLink multicast stays off where the machine says so: other tenants share its switches
MEMORY_USED = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
PASSED_ON = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


@dataclass
class Context:
    """What the phases hand to each other."""

    say: Callable[[str], None]
    proof: Path
    report: dict[str, Any]
    box: Box = field(default_factory=lambda: Box("c0"))
    deadline: float = float("inf")  # of time.monotonic()

    def left(self) -> float:
        """Return how many seconds are left."""
        return self.deadline - time.monotonic()

    @property
    def gpus(self) -> int:
        """Return how many GPUs the machine has."""
        return len(self.report["machine"]["gpus"])

    @property
    def fraction(self) -> float:
        """Return the share of a GPU's memory that one server takes."""
        return FRACTION_OWN if self.gpus > 1 else FRACTION_SHARED

    def log(self, name: str) -> Path:
        """Return where a log goes."""
        return self.proof / "logs" / f"{name}.log"

    def variables(self, port: int = 30000, model: str = "dense", **more: Any) -> dict[str, Any]:
        """Return the inventory's variables."""
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {
            "sglang_server_venv": str(kit.ENGINE),
            "sglang_server_version": "0.5.17",
            "sglang_server_model": str(kit.MODELS / model),
            "sglang_server_load_format": "dummy",
            "sglang_server_attention_backend": "flashinfer",
            "sglang_server_sampling_backend": "flashinfer",
            "sglang_server_chunked_prefill_size": 4096,
            "sglang_server_max_running_requests": 64,
            "sglang_server_mem_fraction_static": self.fraction,
            "sglang_server_base_port": port,
            "sglang_server_environment": passed,
            "cuda_toolkit_fix_wheel_dir": str(kit.KIT / "repair"),
            **more,
        }

    def deploy(self, name: str, box: Box | None = None, **more: Any) -> tuple[Played, dict[str, Any]]:
        """Run the deploy; returns it, and what the servers compiled meanwhile."""
        box = box or self.box
        watch = Compilers()
        watch.start()
        played = box.play("deploy", self.variables(box.port, **more), self.log(name))
        watch.ended.set()
        for unit in units(box):
            self.log(f"{name}-{unit}").write_text(box.journal(unit), encoding="utf-8")
        compiled = {unit: compiled_since_start(box, unit) for unit in units(box)}
        silent = not any(compiled.values()) and not watch.loud()
        return played, {
            **played.to_dict(), "compiled_by_servers": compiled, "compilers_in_units": watch.servers(),
            "nothing_compiled_by_servers": silent, "memory": memory(played.text), "kernels": built(played.text),
        }  # fmt: skip


def output(*argv: str, timeout: float = 60.0) -> str:
    """Return what a command of the machine says, "" when it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def machine(context: Context) -> dict[str, Any]:
    """What the machine is; boots the container."""
    query = "index,uuid,name,compute_cap,memory.total,memory.used,driver_version,pci.bus_id"
    rows = output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits").splitlines()
    gpus = [dict(zip(query.split(","), (cell.strip() for cell in row.split(",")))) for row in rows]
    home = os.environ.get("CUDA_HOME", "")
    nvcc = output(f"{home}/bin/nvcc", "--version").splitlines()[-2:-1] if home else []
    context.report["machine"] = {
        "gpus": gpus, "cores": os.cpu_count(), "kernel": platform.release(), "python": sys.version.split()[0],
        "executable": sys.executable, "base_site": str(kit.base_site()), "cuda_home": home, "nvcc": nvcc,
        "nvidia_folders": sorted(path.name for path in (kit.base_site() / "nvidia").glob("*")),
        "gcc": output("gcc", "-dumpfullversion"), "compiler": output("bash", "-c", "type -p g++ c++ ninja"),
        "nodes": sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        "memory": output("grep", "MemTotal", "/proc/meminfo"), "root": output("findmnt", "-no", "FSTYPE", "/"),
    }  # fmt: skip
    kit.take_small()
    models.write_all(kit.MODELS)  # these, where the kit's first part is an older one
    state = context.box.boot()
    return {"systemd": state, "ok": state in ("running", "degraded") and bool(gpus)}


def naive(context: Context) -> dict[str, Any]:
    """A first start by hand on the machine's own whole toolkit with empty caches: what users have without us."""
    kit.make_venv(context.say)
    down(context)
    box = Box("n0")  # one that still sees the machine's toolkit
    box.boot()
    start_by_hand(context, box, "naive")
    seconds = wait_for_answer(NAIVE_PORT, lambda: box.property("naive.service", "ActiveState") == "active")
    compiled = kernels(0, box.root / "var/lib/naive")
    journal = stop_by_hand(context, box, "naive")
    found: dict[str, Any] = {"first_answer": seconds, "compiled": len(compiled), "modules": compiled}
    first = context.report["phases"].get("cold")
    if first:
        first["of_naive"] = ratio(first, found)
    return found if seconds else {**found, "why": journal[-1500:]}


def start_by_hand(context: Context, box: Box, name: str, gpu: int = 0, home: str = "") -> None:
    """Start a server as a plain unit on the machine's own toolkit, with caches of its own."""
    place, cuda_home = Path(f"/var/lib/{home or name}"), os.environ.get("CUDA_HOME", "")
    words = [f"{kit.ENGINE}/bin/python", "-m", "sglang.launch_server", "--model-path", f"{kit.MODELS}/dense"]
    words += ["--port", str(NAIVE_PORT + 20 * gpu), "--mem-fraction-static", str(context.fraction)]
    words += [word for flag, value in FLAGS.items() for word in (f"--{flag}", value)]
    environment = {
        "HOME": str(place), "PATH": f"{kit.ENGINE}/bin:{cuda_home}/bin:{os.environ['PATH']}", "CUDA_HOME": cuda_home,
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    box.run("mkdir", "-p", str(place), check=True)
    argv = ["systemd-run", f"--unit={name}", "--property=KillMode=mixed", "--property=TimeoutStopSec=60"]
    argv += [f"--setenv={key}={value}" for key, value in environment.items()]
    box.run(*argv, *words, check=True)


def stop_by_hand(context: Context, box: Box, name: str) -> str:
    """Stop it; returns its journal."""
    journal = box.run("journalctl", "-o", "cat", "--no-pager", "-u", f"{name}.service").stdout
    context.log(name).parent.mkdir(parents=True, exist_ok=True)
    context.log(name).write_text(journal, encoding="utf-8")
    box.run("systemctl", "stop", f"{name}.service")
    return journal


def hide_toolkits(box: Box) -> None:
    """Take the machine's own toolkits away from a container: it is a host that has pip's alone."""
    places = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    for folder in {os.path.realpath(path) for path in places if path and os.path.isdir(path)}:
        box.hide(folder)


def broken(context: Context) -> dict[str, Any]:
    """pip's toolkit as pip lays it out: what nvcc and the linker say to it."""
    kit.make_venv(context.say)
    kit.add_toolkit(context.say)
    hide_toolkits(context.box)
    tree = kit.site_of() / "nvidia/cu13"
    source = context.proof / "probe.cu"
    source.write_text(
        "#include <cuda/std/type_traits>\n#include <nv/target>\n__global__ void k() {}\n", encoding="utf-8"
    )
    run = context.box.run
    compiled = run(str(tree / "bin/nvcc"), "-arch=native", "-c", str(source), "-o", "/tmp/probe.o")
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    link = ["g++", "-shared", "-fPIC", "-x", "c++", str(source), f"-L{tree}/lib64", f"-L{tree}/lib64/stubs"]
    linked = run(*link, "-lcudart", "-lcuda", "-o", "/tmp/probe.so")
    said = {
        "nvcc": [line for line in compiled.stderr.splitlines() if "error" in line][:3],
        "link": [line for line in linked.stderr.splitlines() if "cannot find" in line][:3],
    }
    return {**said, "nvcc_rc": compiled.returncode, "link_rc": linked.returncode,
            "ok": compiled.returncode != 0 and linked.returncode != 0}  # fmt: skip


def cold(context: Context) -> dict[str, Any]:
    """Our deploy on the broken toolkit with empty caches: every server answers, and none compiles a module."""
    kit.add_toolkit(context.say)
    kit.add_repair(context.say)
    played, data = context.deploy("cold")
    servers = health(context)
    data["versions"] = versions(context)
    data.update(servers=servers, of_naive=ratio(data, context.report["phases"].get("naive", {})))
    good = played.rc == 0 and len(servers) == context.gpus and all(servers.values())
    if not good:
        data["why"] = played.text[-3000:] if played.rc else "see servers"
    elif not data["nothing_compiled_by_servers"]:
        data["why"] = "see compiled_by_servers and compilers_in_units"
    return data


def ratio(ours: dict[str, Any], naive: dict[str, Any]) -> float | None:
    """Return our time to the first verified server over the naive first answer."""
    mine, theirs = ours.get("first_verified"), naive.get("first_answer")
    return round(mine / theirs, 3) if mine and theirs else None


def health(context: Context, box: Box | None = None) -> dict[str, bool]:
    """Ask every server of the plan from outside."""
    box = box or context.box
    index = {unit: int(unit.partition("@")[2].partition(".")[0]) for unit in units(box)}
    return {unit: answers(box.port + gpu) for unit, gpu in index.items()}


def versions(context: Context) -> dict[str, str]:
    """Return the versions that matter."""
    names = (
        "sglang",
        "torch",
        "flashinfer-python",
        "sglang-kernel",
        "triton",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-runtime",
    )
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    text = context.box.run(f"{kit.ENGINE}/bin/python", "-c", code, *names).stdout.strip()
    toolkit = context.box.root / "etc/sglang/toolkit.json"
    return {"packages": text, "toolkit": toolkit.read_text(encoding="utf-8")[:4000] if toolkit.exists() else ""}


def noop(context: Context) -> dict[str, Any]:
    """The deploy again: nothing changes."""
    played, data = context.deploy("noop")
    good = played.rc == 0 and played.changed == 0
    return data if good else {**data, "why": played.text[-2000:]}


def warm(context: Context) -> dict[str, Any]:
    """All servers down, then the deploy on warm caches, against the engine's own start by hand."""
    box = context.box
    unit = units(box)[0]
    port = box.port + int(unit.partition("@")[2].partition(".")[0])
    stopped = time.monotonic()
    box.run("systemctl", "stop", "sglang.target", timeout=200)
    stop = round(time.monotonic() - stopped, 1)
    box.run("systemctl", "start", unit, check=True)
    own = wait_for_answer(port, lambda: box.property(unit, "ActiveState") == "active")
    box.run("systemctl", "stop", "sglang.target", timeout=200)
    played, data = context.deploy("warm")
    more = round(data["first_verified"] - own, 1) if data["first_verified"] and own else None
    data.update(engine_alone=own, stop=stop, first_over_engine=more)
    good = played.rc == 0 and own is not None
    return data if good else {**data, "why": played.text[-2000:]}


def more(context: Context) -> dict[str, Any]:
    """More servers on one GPU, one after another: each a host of its own that shares the caches."""
    if context.gpus > 1:
        return {"skipped": "every GPU has its own server"}
    data: dict[str, Any] = {"servers": {}}
    for box in MORE:
        box.boot(context.box)
        hide_toolkits(box)
        played, found = context.deploy(f"more-{box.name}", box)
        data["servers"][box.name] = {**found, "answers": health(context, box)}
        if played.rc != 0:
            data["why"] = played.text[-2000:]
    data["all"] = {box.name: health(context, box) for box in (context.box, *MORE)}
    return data


def down(context: Context) -> dict[str, Any]:
    """All servers stop; the GPUs are empty after it."""
    for box in (context.box, *MORE):
        if Path(f"/mnt/{box.name}/run").exists():
            box.run("systemctl", "stop", "sglang.target", timeout=200)
    left = {box.name: box.run("systemctl", "list-units", "--state=active", "--plain", "--no-legend", "sglang@*").stdout
            for box in (context.box, *MORE) if Path(f"/mnt/{box.name}/run").exists()}  # fmt: skip
    # The driver counts memory for seconds after its process has ended: a fault's holder must not leave that out
    empty = time.monotonic()
    while max(used := [int(row) for row in output(*MEMORY_USED).split()] or [0]) > 1024 and context.left() > 0:
        if time.monotonic() - empty > 45:
            break
        time.sleep(0.5)
    data: dict[str, Any] = {"memory": used, "given_back_after": round(time.monotonic() - empty, 1)}
    return {**data, "why": f"still active: {left}"} if any(left.values()) else data


def provoked(context: Context) -> dict[str, Any]:
    """Faults provoked on the GPU, each named by our diagnosis; the kernel that was cut off is built again."""
    down(context)
    data = faults.all_faults(context.box, context.proof / "logs", context.say, context.left)
    played = context.box.play(
        "deploy", context.variables(context.box.port), context.log("repair"), "--tags", "jit", timeout=180
    )
    damaged = faults.damaged(context.box)
    data["repair"] = {"rc": played.rc, "seconds": played.seconds, "kernels": built(played.text), "damaged": damaged}
    if played.rc or damaged or not data["repair"]["kernels"]:
        data["why"] = "the kernel that was cut off was not built again: see repair"
    elif data["right"] != data["of"]:
        data["why"] = "a fault has the wrong name: see faults"
    return data


def container(context: Context) -> dict[str, Any]:
    """GPUs passed into a container badly: the preflight names what is wrong; the whole one passes."""
    found = faults.container(context.box)
    wrong = [name for name, item in found.items() if not item["right"]]
    return {"cases": found, **({"why": f"not named rightly: {', '.join(wrong)}"} if wrong else {})}


def hybrid(context: Context) -> dict[str, Any]:
    """A small hybrid model in each mamba strategy: KV tokens and requests at once, foretold and the engine's own."""
    down(context)
    data: dict[str, Any] = {"strategies": {}}
    for strategy in STRATEGIES:
        # No FlashInfer attention for heads of 256: building it takes longer than the rest of this phase
        wish: dict[str, Any] = {"sglang_server_mamba_strategy": strategy, "sglang_server_max_running_requests": 4096}
        wish |= {"sglang_server_attention_backend": "triton"}
        played, found = context.deploy(f"hybrid-{strategy}", model="hybrid", **wish)
        data["strategies"][strategy] = found
        rows = found["memory"]
        if played.rc != 0 or not rows:
            data["why"] = played.text[-1500:]
        elif any(row["percent_off"] > 3 or abs(1 - row["requests"] / row["requests_foretold"]) > 0.03 for row in rows):
            data.setdefault("why", f"{strategy}: the engine's figures are not those foretold")
    return data


def unequal(context: Context) -> dict[str, Any]:
    """Another process holds half of the last GPU: our deploy plans for it or names it; other GPUs' servers answer."""
    down(context)
    gpu = context.gpus - 1
    holder = faults.hold(int(context.report["machine"]["gpus"][gpu]["memory.total"]) / 2048, gpu)
    try:
        played, data = context.deploy("unequal")
    finally:
        holder.kill()
        holder.wait()
    answers_of = health(context)
    planned = played.rc == 0 and all(row["percent_off"] <= 3 for row in data["memory"])
    named = re.search(r"GPU \d.*(pid \d+|held|in use|MiB free)", played.text) is not None
    others = [good for unit, good in answers_of.items() if unit != f"sglang@{gpu}.service"]
    data.update(servers=answers_of, planned_for=planned, named=named)
    return data if (planned or named) and all(others) else {**data, "why": played.text[-2000:]}


def loop(context: Context) -> dict[str, Any]:
    """The original bash loop: all servers but GPU 0's at once on a cold cache, without checks."""
    if context.gpus == 1:
        return {"skipped": "one GPU: nothing starts at once"}
    down(context)
    box = Box("n0")
    box.boot()
    names = {gpu: f"loop{gpu}" for gpu in range(1, context.gpus)}
    began = time.monotonic()
    for gpu, name in names.items():
        start_by_hand(context, box, name, gpu, home="loop")
    data: dict[str, Any] = {"servers": {}}
    waiting = dict(names)
    while waiting and time.monotonic() - began < 480:
        for gpu, name in list(waiting.items()):
            port = NAIVE_PORT + 20 * gpu
            state = box.property(f"{name}.service", "ActiveState")
            if state == "active" and (ask(port, "/health", timeout=5.0) is None or not answers(port)):
                continue
            data["servers"][name] = round(time.monotonic() - began, 1) if state == "active" else state
            del waiting[gpu]
        time.sleep(0.25)
    data["servers"].update(dict.fromkeys(waiting.values(), "no answer"))
    for name in names.values():
        stop_by_hand(context, box, name)
    data["compiled"] = kernels(0, box.root / "var/lib/loop")
    return data


# Seconds that a phase takes on one H200: with less time left it is not begun
NEEDED = {
    "naive": 285,
    "cold": 190,
    "noop": 30,
    "warm": 105,
    "hybrid": 150,
    "faults": 130,
    "more": 130,
    "unequal": 75,
    "container": 30,
}

PHASES: dict[str, Callable[[Context], dict[str, Any]]] = {
    "machine": machine,
    "naive": naive,
    "broken": broken,
    "cold": cold,
    "noop": noop,
    "more": more,
    "warm": warm,
    "hybrid": hybrid,
    "faults": provoked,
    "container": container,
    "unequal": unequal,
    "loop": loop,
    "down": down,
}
