"""Which machine code is made, and why there may be none."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clover_local.kernels.native import build as module
from clover_local.kernels.native.build import AVX2, AVX512, Missing, build, find_target, target_for
from clover_local.kernels.native.unpack import Variant

VARIANT = Variant(4, "bfloat16", True)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """What a test pretends about the machine is looked up anew, and forgotten."""
    yield
    find_target.cache_clear()
    build.cache_clear()


def cpu_info(*flags: str) -> str:
    return f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\nbugs\t\t: none\n"


def test_best_instructions_of_a_cpu_are_used() -> None:
    assert target_for(cpu_info(*AVX2.flags)) is AVX2
    assert target_for(cpu_info(*AVX2.flags, *AVX512.flags)) is AVX512
    some = [flag for flag in AVX512.flags if flag != "avx512bw"]
    assert target_for(cpu_info(*AVX2.flags, *some)) is AVX2


@pytest.mark.parametrize("text", [cpu_info("sse4_2", "avx2"), "", "flags\n"])
def test_cpu_without_them_has_no_kernels(text: str) -> None:
    assert target_for(text) == Missing("the CPU has neither AVX-512 nor AVX2 with FMA")


def test_other_systems_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    find_target.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    target = find_target()
    assert isinstance(target, Missing)
    assert target.reason.startswith("darwin on")


def test_unreadable_cpu_list_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(find_target(), Missing):
        pytest.skip("not Linux on x86-64")
    find_target.cache_clear()
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    target = find_target()
    assert isinstance(target, Missing)
    assert target.reason.endswith("cannot be read (No such file or directory)")


def test_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    build.cache_clear()
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", None)
    assert build(VARIANT, AVX2) == Missing(
        "triton, whose compiler makes the kernels, is not installed"
    )


def test_folder_that_cannot_be_written_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton._C.libtriton")
    build.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    kernel = build(VARIANT, AVX2)
    assert isinstance(kernel, Missing)
    assert kernel.reason.startswith("compiling the kernels failed (")


def test_a_kernel_is_compiled_once_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton._C.libtriton")
    build.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kernel = build(VARIANT, AVX2)
    assert not isinstance(kernel, Missing)
    assert kernel.worker
    assert kernel.spread
    assert build(VARIANT, AVX2) is kernel
    assert not list(tmp_path.iterdir())
