"""Hosts for tests: what nvidia-smi prints on them, as text."""

from __future__ import annotations

UUIDS = [f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8)]


def smi(memory=97887, count=8, name="NVIDIA RTX PRO 6000 Blackwell Server Edition", used=4, mig="Disabled"):
    sizes = memory if isinstance(memory, list) else [memory] * count
    return "".join(
        f"{index}, {UUIDS[index]}, {name}, {size}, {size - used}, {used}, 12.0, 580.95.05, {mig}, Enabled, "
        f"00000000:{index + 1:02X}:00.0\n"
        for index, size in enumerate(sizes)
    )


def tcp_line(address, port, inode, state="0A"):
    return f"   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"


TCP_HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
