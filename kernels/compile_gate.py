"""Compiles every shipped configuration of every Triton kernel for four GPUs, with no GPU at hand.

    python -m clover_local.kernels.compile_gate [PART-OF-A-NAME ...]

A kernel that asks for more shared memory than a block has fails when it is launched, one that
spills registers is slow, and one whose loads are not aligned loads without `cp.async`: nothing says
so when it compiles. This does: a line for each configuration, and exit status 1 for a broken bound.

It takes the steps of `triton.compile`, without its cache: the time goes into them, not into ptxas.
What does not depend on the GPU is done once, and sm_89 takes the code of sm_80, of which triton
makes it a copy (but ptxas compiles it for sm_89).
"""

import argparse
import contextlib
import importlib
import io
import multiprocessing
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, CompilationError
from triton.runtime.errors import PTXASError

from clover_local.kernels import gpu
from clover_local.kernels.gpu.gate import GateCase

TARGETS = (120, 80, 89, 90)
COPIES = {89: 80}
"""Targets for which triton makes the same PTX as for another one."""
SHARED_BYTES = 101_376
"""Of a block, on sm_120 and sm_89; the others have more."""
PROCESSES = 2


@dataclass(frozen=True)
class Usage:
    """What a kernel takes on one target; bytes but for the registers."""

    registers: int
    stack: int
    spills: int
    shared: int
    cp_async: bool


@dataclass(frozen=True)
class Compiled:
    """What became of one case: by target, how much it takes or why it does not compile."""

    usage: Mapping[int, Usage]
    errors: Mapping[int, str]


class Backend:
    """The steps that triton takes for one target and one set of launch options."""

    def __init__(self, target: int, case: GateCase) -> None:
        self._target = GPUTarget("cuda", target, 32)
        self._backend = CUDABackend(self._target)
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        self._options = self._backend.parse_options(options)
        self._metadata: dict[str, Any] = {"target": self._target, **vars(self._options)}
        self._steps: dict[str, Any] = {}
        self._backend.add_stages(self._steps, self._options, Language.TRITON)
        self._context = ir.context()
        ir.load_dialects(self._context)
        self._backend.load_dialects(self._context)

    def ttir(self, case: GateCase) -> str:
        """The kernel in triton's first form, which is the same for all targets."""
        functions = self._backend.get_codegen_implementation(self._options)
        modules = self._backend.get_module_map()
        module = source(case).make_ir(
            self._target, self._options, functions, modules, self._context
        )
        return str(self._steps["ttir"](module, self._metadata))

    def ptx(self, ttir: str) -> str:
        """The kernel in the form that ptxas takes."""
        with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
            file.write(ttir)
            file.flush()
            module = ir.parse_mlir_module(file.name, self._context)
        module.context = self._context
        for step in ("ttgir", "llir", "ptx"):
            module = self._steps[step](module, self._metadata)
        return str(module)

    def usage(self, ptx: str, *, shared: int) -> Usage:
        """What ptxas says that the kernel takes."""
        with contextlib.redirect_stdout(io.StringIO()) as log:
            self._steps["cubin"](ptx, self._metadata)
        return read_usage(log.getvalue(), shared=shared, cp_async="cp.async" in ptx)

    @property
    def shared(self) -> int:
        """Bytes of shared memory, known once there is PTX."""
        return int(self._metadata["shared"])


def source(case: GateCase) -> ASTSource:
    """A case as triton takes it."""
    fn = case.fn
    missing = [
        name
        for name in fn.arg_names
        if name not in case.constexprs and case.signature.get(name, "constexpr") == "constexpr"
    ]
    unknown = {*case.constexprs, *case.signature} - {*fn.arg_names}
    if missing or unknown:
        raise ValueError(f"{case.name}: no type for {missing}, no argument {sorted(unknown)}")
    signature = {
        name: "constexpr" if name in case.constexprs else case.signature[name]
        for name in fn.arg_names
    }
    aligned = [
        index
        for index, (name, parameter) in enumerate(zip(fn.arg_names, fn.params, strict=True))
        if signature[name][0] in "*iu" and not parameter.do_not_specialize
    ]
    return ASTSource(
        fn,
        signature,
        constexprs={(fn.arg_names.index(name),): value for name, value in case.constexprs.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )


def read_usage(log: str, *, shared: int, cp_async: bool) -> Usage:
    """Reads what `ptxas -v` writes.

    Raises:
        ValueError: the log does not say what a kernel takes.
    """
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    stacks = [int(n) for n in re.findall(r"(\d+) bytes stack frame", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    if not registers or not stacks or not spills:
        raise ValueError(f"ptxas does not say what the kernel takes, but: {log}")
    return Usage(max(registers), sum(stacks), sum(spills), shared, cp_async)


def compile_case(case: GateCase) -> Compiled:
    """Compiles one case for all targets."""
    usage: dict[int, Usage] = {}
    errors: dict[int, str] = {}
    made: dict[int, tuple[str, int]] = {}
    triton.knobs.nvidia.dump_ptxas_log = True
    ttir = ""
    for target in TARGETS:
        try:
            backend = Backend(target, case)
            ttir = ttir or backend.ttir(case)
            if target in COPIES:
                ptx, shared = made[COPIES[target]]
                ptx = ptx.replace(f".target sm_{COPIES[target]}", f".target sm_{target}")
            else:
                ptx = backend.ptx(ttir)
                shared = backend.shared
            made[target] = ptx, shared
            usage[target] = backend.usage(ptx, shared=shared)
        except (CompilationError, PTXASError, RuntimeError, KeyError) as error:
            errors[target] = f"{type(error).__name__}: {error}"
    return Compiled(usage, errors)


def broken_bounds(case: GateCase, compiled: Compiled) -> list[str]:
    """What is wrong with a case, a sentence each."""
    found = [
        f"{case.name} does not compile for sm_{target}: {error}"
        for target, error in compiled.errors.items()
    ]
    for target, usage in compiled.usage.items():
        where = f"{case.name} on sm_{target}"
        if usage.shared > SHARED_BYTES:
            found.append(
                f"{where} takes {usage.shared:,} bytes of shared memory, a block has "
                f"{SHARED_BYTES:,}"
            )
        if usage.stack or usage.spills:
            found.append(
                f"{where} has {usage.stack} bytes of stack and {usage.spills} of spills, not 0"
            )
        if case.wants_cp_async and not usage.cp_async:
            found.append(f"{where} loads without cp.async")
    return found


def kernel_modules() -> Iterator[str]:
    """Names of the modules that have something to compile."""
    for found in pkgutil.walk_packages(gpu.__path__, f"{gpu.__name__}."):
        if hasattr(importlib.import_module(found.name), "gate_cases"):
            yield found.name


def gate_cases(module: str) -> tuple[GateCase, ...]:
    """The cases of one module."""
    cases: tuple[GateCase, ...] = importlib.import_module(module).gate_cases()
    return cases


def identity(case: GateCase) -> str:
    """The same text for cases that are compiled alike."""
    parts = (sorted(case.signature.items()), sorted(case.constexprs.items()), case.wants_cp_async)
    return f"{case.fn.__module__} {case.fn.__name__} {parts} {case.num_warps} {case.num_stages}"


def chosen_cases(parts: Sequence[str]) -> dict[tuple[str, int], GateCase]:
    """Cases by module and place in it, each of its kind once; those whose names hold a part."""
    chosen: dict[tuple[str, int], GateCase] = {}
    known: set[str] = set()
    for module in kernel_modules():
        for index, case in enumerate(gate_cases(module)):
            wanted = not parts or any(part in case.name for part in parts)
            if wanted and identity(case) not in known:
                known.add(identity(case))
                chosen[module, index] = case
    return chosen


def _compile_in_process(module: str, index: int) -> Compiled:
    return compile_case(gate_cases(module)[index])


def _line(case: GateCase, compiled: Compiled) -> str:
    cells = []
    for target in TARGETS:
        usage = compiled.usage.get(target)
        cell = "-" if usage is None else f"{usage.registers} {usage.shared:>7,}"
        cells.append(f"{cell:>13}")
    cp_async = compiled.usage and all(usage.cp_async for usage in compiled.usage.values())
    return (
        f"{case.name:<42} {case.num_warps:>5} {case.num_stages:>6}"
        f"{'yes' if cp_async else '-':>9}{''.join(cells)}"
    )


def main(parts: Sequence[str]) -> int:
    """Prints the table; 1 if a bound is broken.

    Raises:
        SystemExit: kernels are to be interpreted, or no case has such a name.
    """
    parser = argparse.ArgumentParser(prog="clover_local.kernels.compile_gate", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART-OF-A-NAME", help="default: every kernel")
    parts = parser.parse_args(parts).parts
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set, so kernels are not compiled: unset it")
    chosen = chosen_cases(parts)
    if not chosen:
        raise SystemExit(f"no kernel's name holds {' or '.join(parts)}")
    heads = "".join(f"{f'sm_{target}':>13}" for target in TARGETS)
    title = "registers and bytes of shared memory"
    print(f"{title:<42} {'warps':>5} {'stages':>6}{'cp.async':>9}{heads}")
    broken: list[str] = []
    # Forked processes: they have the kernels already, and changes that a test made to them.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        modules, indices = zip(*chosen, strict=True)
        results = pool.map(_compile_in_process, modules, indices)
        for case, compiled in zip(chosen.values(), results, strict=True):
            print(_line(case, compiled), flush=True)
            broken += broken_bounds(case, compiled)
    for line in broken:
        print(line)
    if not broken:
        print(f"{len(chosen)} configurations fit: no spills, no stack, {SHARED_BYTES:,} bytes")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
