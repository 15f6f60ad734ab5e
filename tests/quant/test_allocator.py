"""Freed memory goes back to the system."""

import sys
from pathlib import Path

import pytest
import torch

from clover_local.quant.allocator import give_back

MIB = 1 << 20


def resident() -> int:
    """Bytes that this process has in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_blocks_leave_the_process() -> None:
    # Blocks of 64 KiB, of which every second one stays: the rest does not go back by itself.
    blocks = [torch.ones(MIB // 64) for _ in range(4096)]
    full = resident()
    kept = blocks[1::2]
    del blocks
    before = resident()
    give_back()
    assert len(kept) == 2048
    assert before > full - 16 * MIB
    assert resident() < full - 64 * MIB
