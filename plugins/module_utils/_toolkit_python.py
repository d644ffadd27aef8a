# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""What an environment's interpreter knows of CUDA: NVIDIA's wheels and where their files lie, torch, FlashInfer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ansible_collections.gpufleet.sglang.plugins.module_utils._lock import normalize_name
from ansible_collections.gpufleet.sglang.plugins.module_utils._runner import Runner

# Nothing is imported: folders are found, versions read from the names of the dist-info folders.
SCRIPT = r"""
import glob, importlib.util, json, os, sys, sysconfig
def real(path):  # a venv has one name, however it is reached; a package that is a link keeps its own
    return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
def folders(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [real(path) for path in (spec.submodule_search_locations or ())] if spec else []
infos = {}
for place in sys.path:
    for info in sorted(glob.glob(os.path.join(glob.escape(place), "*.dist-info"))) if os.path.isdir(place) else ():
        name, _, version = os.path.basename(info)[:-10].rpartition("-")
        infos.setdefault(name, [version, real(info)])
print(json.dumps({"prefix": sys.prefix, "include": sysconfig.get_path("include"), "infos": infos,
                  "version": "%d.%d" % sys.version_info[:2],
                  "nvidia": folders("nvidia"), "torch": folders("torch"), "flashinfer": folders("flashinfer")}))
"""
COMPONENTS = {  # name in `cuda-toolkit[...]` -> distribution
    "nvcc": "nvidia-cuda-nvcc",
    "crt": "nvidia-cuda-crt",
    "nvvm": "nvidia-nvvm",
    "cudart": "nvidia-cuda-runtime",
    "cccl": "nvidia-cuda-cccl",
}
SPLIT = ("cuda_nvcc", "cuda_runtime", "cuda_nvrtc", "cublas")  # folders of CUDA 12's wheels


@dataclass(frozen=True)
class Owned:
    """A file that a distribution brought, as its RECORD says."""

    dist: str
    sha: str
    size: int | None


@dataclass(frozen=True)
class Python:
    """One environment."""

    path: str
    prefix: str
    version: str = ""
    include: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)  # normalised name -> version
    infos: Mapping[str, str] = field(default_factory=dict)  # normalised name -> dist-info folder
    trees: tuple[str, ...] = ()  # nvidia/cu13, nvidia/cu14 ...
    split: bool = False
    flashinfer: str = ""  # folder of the package
    torch_cuda: str = ""  # 13.0; "" for a torch without CUDA
    torch_pin: str = ""  # the cuda-toolkit that torch requires, as 13.0.2

    @property
    def tree(self) -> str:
        """The toolkit that pip laid out; "" when there is none."""
        return next(
            (path for path in self.trees if Path(path, "bin/nvcc").exists()), self.trees[0] if self.trees else ""
        )

    @property
    def cccl(self) -> str:
        """The CCCL that FlashInfer brings along; "" when it does not."""
        folder = f"{self.flashinfer}/data/cccl"
        return folder if self.flashinfer and Path(folder, "libcudacxx/include/nv/target").exists() else ""

    @property
    def torch(self) -> str:
        """CUDA's major.minor that torch itself says it runs on, "" when there is no torch, or one without CUDA."""
        match = re.match(r"\d+\.\d+", self.torch_cuda or self.torch_pin)
        return match.group(0) if match else ""

    @property
    def cuda(self) -> str:
        """CUDA's major.minor that kernels are for: torch's, else the runtime wheels'; "" when nothing says it."""
        for text in (self.torch, *self._runtimes()):
            match = re.match(r"\d+\.\d+", text)
            if match:
                return match.group(0)
        return ""

    def _runtimes(self) -> list[str]:
        cu12 = [f"nvidia-cuda-{part}-cu12" for part in ("runtime", "nvrtc", "nvcc")]
        names = ("nvidia-cuda-runtime", *cu12, "cuda-toolkit")
        return [self.packages[name] for name in names if name in self.packages]

    @property
    def wanted(self) -> str:
        """The version of cuda-toolkit whose parts fit torch, as a pip specifier; "" when nothing says it."""
        pinned = self.torch_pin or self.packages.get("cuda-toolkit", "")
        if pinned and (not self.cuda or pinned.startswith(f"{self.cuda}.")):
            return f"=={pinned}"
        return f"=={self.cuda}.*" if self.cuda else ""


def ask(runner: Runner, path: str) -> Python | str:
    """Ask an interpreter; returns the reason in one line when it does not run."""
    done = runner.run([path, "-I", "-c", SCRIPT], timeout=60.0, cwd="/")
    if done.rc != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return f"{path} does not run: {said[-1] if said else f'rc {done.rc}'}"
    try:
        data = json.loads(done.stdout.strip().splitlines()[-1])
        infos = {normalize_name(name): pair for name, pair in data["infos"].items()}
        nvidia = [Path(item) for item in data["nvidia"]]
        torch = data["torch"][0] if data["torch"] else ""
        return Python(
            path=path,
            prefix=data["prefix"],
            version=data["version"],
            include=data["include"],
            packages={name: pair[0] for name, pair in infos.items()},
            infos={name: pair[1] for name, pair in infos.items()},
            trees=tuple(str(item) for base in nvidia for item in sorted(base.glob("cu1[3-9]"), reverse=True)),
            split=any((base / name).is_dir() for base in nvidia for name in SPLIT),
            flashinfer=data["flashinfer"][0] if data["flashinfer"] else "",
            torch_cuda=_torch_cuda(torch),
            torch_pin=_torch_pin(infos["torch"][1] if "torch" in infos else ""),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        return f"{path} is no Python that answers ({exc})"


def _torch_cuda(folder: str) -> str:
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", read(f"{folder}/version.py"), re.MULTILINE)
    return match.group(1) if match else ""


def _torch_pin(info: str) -> str:
    match = re.search(
        r"^Requires-Dist: cuda-toolkit\[[^\]]*\]\s*\(?==([\d.]*\d)", read(f"{info}/METADATA"), re.MULTILINE
    )
    return match.group(1) if match else ""


def owned_files(infos: Mapping[str, str], tree: str) -> dict[str, Owned]:
    """Return which distribution of NVIDIA's brought which file of a tree (paths relative to it), from the RECORDs."""
    found: dict[str, Owned] = {}
    for name, info in infos.items():
        if not name.startswith("nvidia-"):
            continue
        base = Path(info).parent
        try:
            prefix = str(Path(tree).relative_to(base)) + "/"
        except ValueError:
            continue
        for line in read(f"{info}/RECORD").splitlines():
            if line.startswith(prefix):
                path, _comma, rest = line.rpartition(",")[0].rpartition(",")
                size = line.rpartition(",")[2]
                item = Owned(name, rest, int(size) if size.isascii() and size.isdigit() else None)
                path = path[len(prefix) :]
                twice = path in found and found[path].sha != rest  # of two wheels: either's content is right
                found[path] = Owned(name, "", None) if twice else item
    return found


def installed_infos(folder: str) -> dict[str, str]:
    """Return the dist-info folders of a private prefix by normalised name."""
    found = {}
    for info in sorted(Path(folder).glob("*.dist-info")):
        found[normalize_name(info.name[: -len(".dist-info")].rpartition("-")[0])] = str(info)
    return found


def read(path: str | Path) -> str:
    """Return a file's text, "" when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
