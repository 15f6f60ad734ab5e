"""The compile gate: green for what ships, red for what does not fit.

It runs in processes of its own, where kernels are compiled and not interpreted.
"""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from clover_local.kernels import compile_gate
from clover_local.kernels.compile_gate import Compiled, Usage, broken_bounds, read_usage
from clover_local.kernels.gpu.gate import GateCase

FITS = Usage(registers=128, stack=0, spills=0, shared=101_376, cp_async=True)
CASE = GateCase("a kernel", None, {}, {}, num_warps=4, num_stages=3, wants_cp_async=True)
LOG = """
ptxas info    : Compiling entry function 'k' for 'sm_120a'
ptxas info    : Function properties for k
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 48 bytes cumulative stack size
"""
TOO_LARGE = """
import sys
from dataclasses import replace
from clover_local.kernels import compile_gate
from clover_local.kernels.gpu.linear import packed_linear

config = packed_linear.CONFIGS[-1]
config = replace(config, num_stages=12)
packed_linear.CONFIGS = (*packed_linear.CONFIGS[:-1], config)
case = next(case for case in packed_linear.gate_cases() if case.num_stages == 12)
sys.exit(compile_gate.main([case.name]))
"""
COPIES = """
from clover_local.kernels import compile_gate
from clover_local.kernels.compile_gate import Backend
from clover_local.kernels.gpu.linear import packed_linear

case = next(case for case in packed_linear.gate_cases() if case.constexprs["BITS"] == 8)
for target, other in compile_gate.COPIES.items():
    made, copied = (Backend(t, case).ptx(Backend(t, case).ttir(case)) for t in (target, other))
    assert made == copied.replace(f".target sm_{other}", f".target sm_{target}")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process in which kernels are compiled."""
    environment = {**os.environ}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_every_shipped_configuration_fits_all_targets() -> None:
    done = run("-m", "clover_local.kernels.compile_gate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "configurations fit" in done.stdout


@pytest.mark.slow
def test_gate_turns_red_when_a_configuration_is_too_large() -> None:
    done = run("-c", TOO_LARGE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bytes of shared memory, a block has 101,376" in done.stdout


@pytest.mark.slow
def test_code_of_a_copied_target_is_what_triton_makes_for_it() -> None:
    done = run("-c", COPIES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="no kernel's name holds no-such-kernel"):
        compile_gate.main(["no-such-kernel"])


def test_interpreted_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET is set"):
        compile_gate.main([])


def test_what_fits_breaks_no_bound() -> None:
    assert broken_bounds(CASE, Compiled({120: FITS}, {})) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shared": 114_688}, "takes 114,688 bytes of shared memory, a block has 101,376"),
        ({"spills": 16}, "has 0 bytes of stack and 16 of spills, not 0"),
        ({"stack": 8}, "has 8 bytes of stack and 0 of spills, not 0"),
        ({"cp_async": False}, "loads without cp.async"),
    ],
    ids=["shared", "spills", "stack", "cp.async"],
)
def test_broken_bound_is_a_sentence(change: dict[str, Any], says: str) -> None:
    usage = {80: FITS, 120: replace(FITS, **change)}
    assert broken_bounds(CASE, Compiled(usage, {})) == [f"a kernel on sm_120 {says}"]


def test_kernel_that_does_not_compile_breaks_a_bound() -> None:
    (line,) = broken_bounds(CASE, Compiled({}, {90: "PTXASError: too many resources"}))
    assert line == "a kernel does not compile for sm_90: PTXASError: too many resources"


def test_log_of_ptxas_is_read() -> None:
    usage = read_usage(LOG.format(stack=24, spills=16), shared=1024, cp_async=False)
    assert usage == Usage(registers=80, stack=24, spills=32, shared=1024, cp_async=False)


def test_log_without_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="ptxas does not say"):
        read_usage("ptxas info : nothing", shared=0, cp_async=False)
