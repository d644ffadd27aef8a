"""Environments whose parts do not fit, CUDA 12's wheels, the in-place mode, killed runs and two at once: all real."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import naive
import pytest
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import SubprocessRunner
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_build import Settings
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_elf import soname
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_finish import remove
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_layout import machine_folder, multiarch
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_run import run
from ansible_collections.gpufleet.sglang.plugins.module_utils._toolkit_stub import make_stub
from lab import PYTHON

NEW = "0.7.2.post1"
INCOMPATIBLE = "CUDA compiler and CUDA toolkit headers are incompatible"


def codes(items):
    return {item["code"] for item in items}


def test_skew_is_seen_named_and_repaired_beside_the_environment(toolkit_lab):
    env = toolkit_lab.environment("skew", *naive.wheels("0.5.23", compiler_only=True), flashinfer=NEW)
    wheels = env.files()
    assert INCOMPATIBLE in env.flashinfer(env.tree).output

    refused = env.module(skew="fail")
    assert refused.result["failed"]
    assert refused.cpu < 3  # nothing was compiled
    assert codes(refused.result["problems"]) == {"skew_runtime"}
    assert f'{env.python} -m pip install "cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.*"' in refused.result["msg"]
    assert env.record()["cuda_home"] is None

    done = env.module(skew="install")
    home = done.result["cuda_home"]
    assert done.result.get("proven"), done.result
    assert done.result["versions"]["nvcc"].startswith("13.0.")
    assert env.record()["private"].startswith(str(env.cuda))
    tvm = env.tvm_ffi(home)  # FlashInfer too: in the matrix, with the sets of a plain pip install
    assert tvm.ok, tvm.output
    again = env.module(skew="install")
    assert not again.result["changed"]
    assert again.cpu <= 3

    tree = Path(env.record()["private"], "nvidia/cu13")  # a part lost, one zeroed at its old size and time
    cicc, status = (tree / "nvvm/bin/cicc").read_bytes(), (tree / "nvvm/bin/cicc").stat()
    (tree / "include/cuda_fp16.h").unlink()
    (tree / "nvvm/bin/cicc").write_bytes(bytes(len(cicc)))
    os.utime(tree / "nvvm/bin/cicc", ns=(status.st_atime_ns, status.st_mtime_ns))
    healed = env.module(skew="install")
    assert healed.result["cuda_home"] == home, healed.result
    assert "wheels_damaged" in healed.codes
    assert (tree / "include/cuda_fp16.h").exists()
    assert (tree / "nvvm/bin/cicc").read_bytes() == cicc
    again = env.module(skew="install")
    assert not again.result["changed"]
    assert again.cpu <= 3
    assert env.files() == wheels
    env.module(state="absent")
    assert not env.cuda.exists()
    toolkit_lab.discard(env)


@pytest.mark.parametrize("version", ["12.8.93", pytest.param("12.9.86", marks=pytest.mark.matrix)])
def test_cuda_12_wheels_are_refused_with_the_remedy(toolkit_lab, version):
    minor = version.rpartition(".")[0]
    wheels = [f"nvidia-cuda-nvcc-cu12=={version}", f"nvidia-cuda-runtime-cu12=={minor}.*"]
    env = toolkit_lab.environment(f"cu{minor}", *wheels, torch=False)
    assert (env.site / "nvidia/cuda_nvcc/bin/ptxas").exists()
    refused = env.module(cuda_home="")
    assert refused.result["failed"]
    assert "wheels_cu12" in codes(refused.result["problems"])
    assert "neither nvcc nor cicc" in refused.result["msg"]
    assert "Install a CUDA 12.8 or 12.9 toolkit on the host" in refused.result["msg"]
    assert env.record()["cuda_home"] is None
    assert refused.cpu < 3
    toolkit_lab.discard(env)


@pytest.mark.matrix
@pytest.mark.parametrize(("version", "flashinfer"), [("0.5.17", "0.6.15.post1"), ("0.5.23", "0.7.2")])
def test_a_plain_pip_install_of_sglang_ends_in_a_working_cuda_home(toolkit_lab, version, flashinfer):
    env = toolkit_lab.environment(f"naive-{version}", "--no-deps", *naive.wheels(version), flashinfer=flashinfer)
    wheels = env.files()
    assert INCOMPATIBLE in env.flashinfer(env.tree).output
    done = env.module(probes=["link", "headers"])
    home = done.result["cuda_home"]
    assert done.result.get("proven"), done.result
    for module in ("page", "norm"):  # norm is linked with cublas, torch's own
        built = env.flashinfer(home, module)
        assert built.ok, built.output
    tvm = env.tvm_ffi(home)
    assert tvm.ok, tvm.output
    assert not env.module(probes=["link", "headers"]).result["changed"]
    assert env.files() == wheels
    print(f"naive {version}: repaired in {done.seconds:.1f} s, {home}")
    toolkit_lab.discard(env)


@pytest.mark.matrix
def test_in_place_adds_only_and_takes_all_back(toolkit_lab):
    parts = "nvcc,crt,nvvm,cudart,cccl"
    env = toolkit_lab.environment("in-place", f"cuda-toolkit[{parts}]==13.2.*", flashinfer=NEW)
    wheels = env.files()
    assert env.module(repair="in_place", _check=True).result["changed"]
    assert env.files() == wheels
    done = env.module(repair="in_place")
    assert done.result["cuda_home"] == str(env.tree)
    page, tvm = env.flashinfer(env.tree), env.tvm_ffi(env.tree)
    assert page.ok, page.output
    assert tvm.ok, tvm.output
    assert not env.module(repair="in_place").result["changed"]

    stub, record = env.tree / "lib/stubs/libcuda.so", next(env.cuda.glob("in-place/*.json"))
    added, size = sorted(item["path"] for item in json.loads(record.read_text())["additions"]), stub.stat().st_size
    stub.write_bytes(b"")
    (env.tree / "lib64").unlink()
    (env.tree / "lib64").symlink_to("bin")
    (env.tree / "lib/libcudart.so").unlink()
    (env.tree / "lib/libcudart.so").write_text("junk")
    mended = env.module(repair="in_place").result
    assert mended["proofs"]
    assert mended["proven"], mended
    assert stub.stat().st_size == size
    assert not env.module(repair="in_place").result["changed"]
    record.write_text("")
    assert env.module(repair="in_place").result["proven"]
    assert sorted(item["path"] for item in json.loads(record.read_text())["additions"]) == added
    assert not env.module(repair="in_place").result["changed"]

    toolkit_lab.pip("-U", f"cuda-toolkit[{parts}]==13.4.*", python=env.folder / "venv/bin/python")
    earlier = stub.read_bytes()
    drifted = env.module(repair="in_place", _check=True)
    assert drifted.result["changed"]  # noticed
    done = env.module(repair="in_place")
    assert done.result["versions"]["nvcc"].startswith("13.4.")
    assert env.tvm_ffi(env.tree).ok
    assert stub.read_bytes() != earlier  # it has the functions of the new header
    assert not env.module(repair="in_place").result["changed"]
    assert env.module(state="absent").result["changed"]
    left = [path for path in (env.tree / "lib").iterdir() if path.is_symlink() or path.name == "stubs"]
    assert left == []
    assert not os.path.lexists(env.tree / "lib64")
    assert not env.cuda.exists()
    toolkit_lab.discard(env)


PROFILE = """TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/$(_TARGET_DIR_)/include" $(_SPACE_)
SYSTEM_INCLUDES += "-isystem" "$(TOP)/$(_TARGET_DIR_)/include/cccl" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/$(_TARGET_DIR_)/lib/stubs" "-L$(TOP)/$(_TARGET_DIR_)/lib"
"""


def lay_out(kind, source, top):
    """Arrange real files as NVIDIA's installer, conda or Debian do; returns the CUDA_HOME to ask for."""
    target = f"targets/{machine_folder()}"
    places = {
        "nvidia": {"bin": "bin", "nvvm": "nvvm", "include": f"{target}/include", "lib": f"{target}/lib"},
        "conda": {"bin": "bin", "nvvm": "nvvm", "include": f"{target}/include", "lib": f"{target}/lib"},
        "debian": {
            "bin": "usr/lib/nvidia-cuda-toolkit/bin",
            "nvvm/bin": "usr/lib/nvidia-cuda-toolkit/bin",
            "nvvm/libdevice": "usr/lib/nvidia-cuda-toolkit/libdevice",
            "include": "usr/include",
            "lib": f"usr/lib/{multiarch()}",
        },
    }[kind]
    for name, place in places.items():
        shutil.copytree(source / name, top / place, copy_function=os.link, dirs_exist_ok=True)
    profile = top / places["bin"] / "nvcc.profile"
    profile.unlink()
    profile.write_text(PROFILE)
    (top / places["lib"] / "libcudart.so").symlink_to("libcudart.so.13")
    if kind == "debian":
        shutil.copy("/usr/include/math.h", top / "usr/include/math.h")
        return top / "usr"
    if kind == "conda":
        (top / "conda-meta").mkdir()
        (top / "bin/python3").symlink_to("/bin/false")
        return top
    (top / "include").symlink_to(f"{target}/include")
    (top / "lib64").symlink_to(f"{target}/lib")
    (top / target / "lib64").symlink_to("lib")
    (top / target / "lib/stubs").mkdir()
    make_stub(SubprocessRunner(), str(top / "include"), str(top / "lib64/stubs/libcuda.so"), "gcc")
    return top


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "how"), [("nvidia", "as it is"), ("conda", "compose"), ("debian", "compose")])
def test_other_layouts_are_proven_as_they_are_or_composed(shared, tmp_path, kind, how):
    home = lay_out(kind, shared.tree, shared.folder / kind)
    settings = Settings(
        python=shared.python,
        folder=str(tmp_path / "cuda"),
        config_dir=str(tmp_path / "etc"),
        cuda_home=str(home),
        archs=("12.0f",),
        probes=("link", "headers"),
        base=str(shared.folder / kind),
    )
    out = run(settings, SubprocessRunner(), {"PATH": "/usr/bin"})
    assert out.proven, out.problems
    assert (out.details["layout"], out.details["how"]) == (kind, how)
    assert (out.cuda_home == str(home)) == (how == "as it is")
    page, tvm = shared.flashinfer(out.cuda_home), shared.tvm_ffi(out.cuda_home)
    assert page.ok, page.output
    assert tvm.ok, tvm.output
    assert not run(settings, SubprocessRunner(), {"PATH": "/usr/bin"}).changed
    remove(settings.folder, settings.config_dir)


def test_a_damaged_tree_heals_and_the_tags_alone_make_and_take_back(shared):
    env = shared
    wheels = env.files()
    for tag in ("toolkit", "cccl"):
        assert env.tags(tags=tag)[0] == 1
        home = Path(env.record()["cuda_home"])
        assert env.tags(tags=tag)[0] == 0
    stub = home / "lib64/stubs/libcuda.so"
    whole = stub.read_bytes()
    for damage in (b"", whole[:20_000], b"x" * len(whole)):
        stub.write_bytes(damage)
        healed = env.module()
        assert healed.result["changed"]
        assert healed.result["cuda_home"] == str(home)
        assert stub.read_bytes() == whole
    assert soname(str(stub)) == "libcuda.so.1"
    again = env.module()
    assert not again.result["changed"]
    assert again.cpu <= 3
    for changed in (1, 0):
        assert env.tags(tags="toolkit", playbook="remove")[0] == changed
    assert not env.cuda.exists()
    assert not env.config.exists()
    assert env.files() == wheels


@pytest.fixture(scope="module")
def shared(toolkit_lab):
    env = toolkit_lab.environment("kill", "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.2.*", flashinfer=NEW)
    yield env
    toolkit_lab.discard(env)


@pytest.mark.parametrize(("name", "wheel"), [("include/cuda_fp16.h", "runtime"), ("nvvm/bin/cicc", "nvvm")])
def test_a_damaged_wheel_of_the_environment_is_named_with_the_remedy(shared, name, wheel):
    env, path = shared, shared.tree / name
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        refused = env.module(skew="fail")
        path.unlink()
        lost = env.module(skew="fail")
    finally:
        path.write_bytes(content)
        path.chmod(status.st_mode)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for done, what in ((refused, "is not what the wheel brought"), (lost, "is missing")):
        said = done.result["msg"]
        assert f"{path}, of the wheel nvidia-{'cuda-' if wheel == 'runtime' else ''}{wheel}==13.2." in said
        assert what in said
        assert f"{env.python} -m pip install --force-reinstall --no-deps nvidia-" in said
        assert done.cpu <= 3


def test_two_spellings_of_a_folder_are_one(shared, tmp_path):
    env = shared
    home = env.module().result["cuda_home"]
    (tmp_path / "link").symlink_to(env.folder)
    for spelling in (tmp_path / "link", env.folder / "venv/.."):
        done = env.module(
            folder=f"{spelling}/cuda",
            config_dir=f"{spelling}/etc",
            python=f"{spelling}/venv/bin/python",
            cuda_home=f"{spelling}/venv/lib/python{PYTHON}/site-packages/nvidia/cu13",
        )
        assert not done.result["changed"], done.result["diff"]
        assert done.result["cuda_home"] == home


def whole(env):
    """Return the trees by their manifests; fails when one of them is not whole."""
    found = {}
    if not env.cuda.exists():
        return found
    for path in env.cuda.iterdir():
        if path.suffix in (".new", ".old") or path.name in ("wheels", "in-place") or not path.is_dir():
            continue
        dangling = [p for p in path.rglob("*") if p.is_symlink() and not p.exists()]
        assert not dangling
        assert (path / "lib64/libcudart.so").exists()
        assert (path / "lib64/stubs/libcuda.so").stat().st_size > 10_000
        assert (path / "include/nv/target").exists()
        found[path.name] = sorted(str(p.relative_to(path)) for p in path.rglob("*"))
    return found


def test_a_killed_run_leaves_the_old_tree_or_the_new_one(shared, request):
    env = shared
    full = request.config.getoption("-m") != "not matrix"
    kinds = ["toolkit", "engine"]
    wanted = {}
    for kind in kinds:  # each tree once, undisturbed
        begun = time.monotonic()
        env.module(cccl=kind)
        span = time.monotonic() - begun
        wanted.update(whole(env))
        shutil.rmtree(env.cuda)
    assert len(wanted) == 2
    chance = random.Random(3)
    seen, ends = [], []
    for number in range(40 if full else 12):
        if number % 4 == 0:
            shutil.rmtree(env.cuda, ignore_errors=True)
        process = env.start(cccl=kinds[number % 2])
        time.sleep(chance.uniform(0, span))
        os.killpg(process.pid, signal.SIGKILL)
        ends.append(process.wait())
        trees = whole(env)
        seen.append(len(trees))
        assert all(wanted[name] == content for name, content in trees.items())
        path = env.config / "toolkit.json"
        home = json.loads(path.read_text())["cuda_home"] if path.exists() else None
        assert home is None or os.path.basename(home) in wanted
    assert -signal.SIGKILL in ends  # they did die at work
    done = env.module(cccl="toolkit")
    assert done.result.get("proven"), done.result
    assert os.path.basename(done.result["cuda_home"]) in whole(env)
    assert not list(env.cuda.glob("*.new"))
    print(f"killed {ends.count(-signal.SIGKILL)} times at work; trees found afterwards: {seen}")


@pytest.mark.parametrize("kinds", [("toolkit", "toolkit"), ("toolkit", "engine")])
def test_two_at_once(shared, kinds):
    env = shared
    shutil.rmtree(env.cuda, ignore_errors=True)
    (env.config / "toolkit.json").unlink(missing_ok=True)
    processes = [env.start(cccl=kind) for kind in kinds]
    results = [json.loads(process.stdout.read().strip().splitlines()[-1]) for process in processes]
    for process in processes:
        process.wait()
    assert all(result["proven"] for result in results)
    homes = {result["cuda_home"] for result in results}
    trees = whole(env)
    assert len(homes) == len(set(kinds))
    assert os.path.basename(env.record()["cuda_home"]) in trees
    assert sum(len(result["proofs"]) for result in results) == len(homes)  # the second found the first one's proof
