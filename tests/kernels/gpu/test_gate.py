"""What ships is what the compile gate compiles: kernels, their configurations, their arguments."""

import ast
import dataclasses
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clover_local.kernels import gpu
from clover_local.kernels.compile_gate import gate_cases, kernel_modules

FOLDER = Path(gpu.__path__[0])
BASELINES = {"experts.plain_wna16"}  # what the bench compares with: as slow as it is
PREFIX = f"{gpu.__name__}."
MODULES = [
    found.name.removeprefix(PREFIX)
    for found in pkgutil.walk_packages(gpu.__path__, PREFIX)
    if not found.ispkg
]
CASES = [case for module in kernel_modules() for case in gate_cases(module)]


def tree(name: str) -> ast.Module:
    return ast.parse(
        FOLDER.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    )


def launches(name: str) -> list[ast.Call]:
    """Calls `kernel[grid](...)` of a module."""
    return [
        node
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("kernel")
    ]


def module_of(name: str) -> ModuleType:
    return importlib.import_module(PREFIX + name)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One configuration of a module: `table` itself, or its element `index`."""

    module: str
    table: str
    index: int | None

    def __str__(self) -> str:
        place = "" if self.index is None else f"-{self.index}"
        return f"{self.module}-{self.table}{place}"


def tuned_fields(config: object) -> list[str]:
    """Launch options in a configuration; empty for what is none."""
    if not dataclasses.is_dataclass(config):
        return []
    names = [field.name for field in dataclasses.fields(config)]
    return [name for name in names if name.endswith(("warps", "stages"))]


def entries() -> list[Entry]:
    """The configurations that modules define; not those that they import."""
    found = []
    for name in sorted({*MODULES} - BASELINES):
        for node in tree(name).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for table in [target.id for target in targets if isinstance(target, ast.Name)]:
                value = getattr(module_of(name), table)
                if tuned_fields(value):
                    found.append(Entry(name, table, None))
                elif isinstance(value, tuple):
                    found += [Entry(name, table, i) for i, c in enumerate(value) if tuned_fields(c)]
    return found


def test_every_kernel_that_is_launched_is_compiled_by_the_gate() -> None:
    launched = {
        call.func.value.id
        for name in {*MODULES} - BASELINES
        for call in launches(name)
        if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)
    }
    assert launched
    assert launched == {case.fn.__name__ for case in CASES}


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_gate_compiles_every_configuration(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(entry.module)
    table = getattr(module, entry.table)
    config = table if entry.index is None else table[entry.index]
    before = module.gate_cases()
    for field in tuned_fields(config):
        changed: Any = dataclasses.replace(config, **{field: 2 * getattr(config, field)})
        if entry.index is not None:
            changed = (*table[: entry.index], changed, *table[entry.index + 1 :])
        monkeypatch.setattr(module, entry.table, changed)
        assert module.gate_cases() != before, f"no case depends on {field}"


@pytest.mark.parametrize("name", [name for name in MODULES if launches(name)])
def test_kernels_are_launched_by_keyword(name: str) -> None:
    for call in launches(name):
        assert not call.args, f"line {call.lineno}"
        assert all(keyword.arg for keyword in call.keywords), f"line {call.lineno}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case_gives_every_argument_a_type_or_a_value(case: Any) -> None:
    typed = {name for name, kind in case.signature.items() if kind != "constexpr"}
    assert {*case.constexprs} | typed == {*case.fn.arg_names}
    assert {*case.constexprs} >= {name for name in case.signature if name not in typed}


def test_names_of_cases_differ() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len({*names}), sorted({n for n in names if names.count(n) > 1})
