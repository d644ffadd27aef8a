"""Toolkits 13.0 to 13.5, FlashInfer before and after it brought its own CCCL, tvm-ffi: fails before, passes after.

The whole matrix is `make test-toolkit`; the part in MATRIX_FAST is in `make test`. The table's seconds are wall time,
and processor time in brackets: that one is bounded, for it is what a busy machine does not stretch.
"""

from __future__ import annotations

import os
import time

import pytest

PARTS = {"13.0": "13.0.*", "13.1": "13.1.*", "13.2": "13.2.*", "13.3": "13.3.*", "13.4": "13.4.*", "13.5": "13.5.*"}
NEW, OLD = "0.7.2.post1", "0.6.9"
# The old FlashInfer gets a toolkit without CCCL: that was its fault in the field.
MATRIX = [(cuda, flashinfer) for cuda in PARTS for flashinfer in (NEW, OLD)]
FAST = ("13.2", NEW)
rows: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    head = "| CUDA | FlashInfer | before | wheels | repair | page after | tvm-ffi after | again | two tags again |"
    text = "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *rows])
    print(f"\n{text}\n")
    if os.environ.get("TOOLKIT_TABLE"):
        with open(os.environ["TOOLKIT_TABLE"], "w", encoding="utf-8") as file:
            file.write(f"{text}\n")


@pytest.mark.parametrize(
    ("cuda", "flashinfer"),
    [pytest.param(*row, id="-".join(row), marks=() if row == FAST else pytest.mark.matrix) for row in MATRIX],
)
def test_fails_before_passes_after(toolkit_lab, cuda, flashinfer):
    with_cccl = flashinfer == NEW
    parts = "nvcc,crt,nvvm,cudart,cccl" if with_cccl else "nvcc,crt,nvvm,cudart"
    started = time.monotonic()
    env = toolkit_lab.environment("row", f"cuda-toolkit[{parts}]=={PARTS[cuda]}", flashinfer=flashinfer)
    wheels, installed = env.files(), time.monotonic() - started

    page, tvm = env.flashinfer(env.tree), env.tvm_ffi(env.tree)
    assert not page.ok
    assert not tvm.ok
    if with_cccl:
        assert "cannot find -lcudart" in page.output
        assert "cannot find -lcuda:" in page.output
        assert "cannot find -lcudart" in tvm.output
    else:
        assert "nv/target: No such file or directory" in page.output
        assert "nv/target: No such file or directory" in tvm.output

    first = env.module(probes=["link", "headers"])
    home = first.result["cuda_home"]
    assert first.result.get("proven"), first.result
    assert first.result["changed"]
    assert home.startswith(f"{env.cuda}/{cuda}.")
    assert all(item["repaired"] for item in first.result["findings"] if item["severity"] == "error")
    assert {"lib64_missing", "libcudart_so_missing", "libcuda_stub_missing"} <= set(first.codes)
    assert ("nv_target_missing" in first.codes) != with_cccl
    assert ("ninja_pinned" in first.codes) != with_cccl  # FlashInfer <= 0.6.10 keeps the build.ninja that failed
    assert env.record()["cuda_home"] == home

    page, tvm = env.flashinfer(home), env.tvm_ffi(home)
    assert page.ok, page.output
    assert tvm.ok, tvm.output
    assert env.files() == wheels

    again = env.module(probes=["link", "headers"])
    assert not again.result["changed"], again.result["diff"]
    assert again.result["proofs"] == []
    assert again.cpu <= 3
    env.tags()  # its environment is the role's, which is the unit's: one proof more at most
    twice = env.tags()
    assert twice.changed == 0, twice.output
    assert twice.cpu <= 10
    rows.append(
        f"| {cuda} | {flashinfer} | {'-lcudart -lcuda' if with_cccl else 'nv/target'} | {installed:.0f} s "
        f"| {first.seconds:.1f} s | {page.seconds:.1f} s | {tvm.seconds:.1f} s "
        f"| {again.seconds:.2f} s ({again.cpu:.2f}) | {twice.seconds:.1f} s ({twice.cpu:.1f}) |"
    )
    print(rows[-1])

    gone = env.module(state="absent")
    assert gone.result["changed"]
    assert not env.cuda.exists()
    assert not env.module(state="absent").result["changed"]
    assert env.files() == wheels
    toolkit_lab.discard(env)
