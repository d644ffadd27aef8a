"""Where modules lie and how they are built, as in 0.7.2; page.cu lacks a header."""

import os
import pathlib
import shutil
import time

import tvm_ffi

FOLDER = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"], ".cache/flashinfer/0.7.2/120f/cached_ops")


def write_if_different(path, content):
    if not path.exists() or path.read_text() != content:
        path.write_text(content)


class JitSpec:
    def __init__(self, name):
        self.name = name
        self.build_dir = FOLDER / name
        self.ninja_path = self.build_dir / "build.ninja"

    def get_library_path(self):
        return self.build_dir / f"{self.name}.so"

    def write_ninja(self):
        self.build_dir.mkdir(parents=True, exist_ok=True)
        write_if_different(self.ninja_path, f"cuda_home = {os.environ['CUDA_HOME']}\n")

    def build(self, verbose=None, need_lock=False):
        self.write_ninja()
        time.sleep(1)
        if self.name == "page":
            raise RuntimeError("Ninja build failed.\npage.cu:1:10: fatal error: nv/target: No such file or directory")
        libc = next(path for path in pathlib.Path("/lib").glob("*/libm.so.6"))
        if not self.get_library_path().exists():
            shutil.copyfile(libc, self.get_library_path())

    def build_and_load(self):
        self.build()
        return tvm_ffi.load_module(str(self.get_library_path()))
