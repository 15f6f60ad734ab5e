"""Imports go one way: cli -> quant -> the runtime -> kernels -> torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each layer may import itself and what stands to its right.
LAYERS = [
    ("cli",),
    ("quant", "calibration_data"),
    ("demo",),
    ("chat", "bench", "session", "placement", "counted", "traces", "doctor"),
    ("generate",),
    ("decoding", "model"),
    ("experts", "cache", "memory", "residency"),
    ("checkpoint", "gguf", "tokenizer", "hub", "fetch"),
    ("config",),
    ("files",),
    ("errors", "prefix"),
    ("kernels",),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CODE = ("clover_local", "kernels", "quant", "recipes")
SOURCES = [
    path
    for folder in ("clover_local", "kernels", "quant", "calibration_data")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def part_of(path: Path) -> str:
    """The layer's name that a source file belongs to; '' for the package's own top files."""
    relative = path.relative_to(ROOT)
    parts = relative.parts if relative.parts[0] != "clover_local" else relative.parts[1:]
    return "" if parts[0].startswith("__") else parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """Dotted names of all imports of a file, late ones too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_source_file_belongs_to_a_layer() -> None:
    unknown = {part_of(path) for path in SOURCES} - set(RANK) - {""}
    assert not unknown, f"say in LAYERS where {sorted(unknown)} stand"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "clover_local" and len(parts) > 1 and parts[1] in RANK and part:
            assert RANK[parts[1]] >= RANK[part], f"{part} must not import {name}"
        assert parts[0] not in ("kernels", "quant", "calibration_data", "click", "transformers")
        if part in ("kernels",):
            assert parts[0] != "clover_local" or parts[1:2] in ([], ["kernels"]), name


def test_package_markers_of_the_root_folders_hold_a_docstring_only() -> None:
    for folder in ("kernels", "quant", "calibration_data"):
        (statement,) = ast.parse((ROOT / folder / "__init__.py").read_text()).body
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Constant)
        assert isinstance(statement.value.value, str)


def test_a_folder_holds_at_most_sixteen_files() -> None:
    folders = [ROOT / top for top in CODE]
    folders += [path for top in CODE for path in (ROOT / top).rglob("*") if path.is_dir()]
    for folder in folders:
        if folder.name != "__pycache__" and folder != ROOT / "clover_local" / "cli":
            files = [path.name for path in folder.iterdir() if path.is_file()]
            assert len(files) <= 16, f"{folder.relative_to(ROOT)} holds {len(files)} files"


def test_a_source_file_has_at_most_four_hundred_lines() -> None:
    for top in CODE:
        for path in (ROOT / top).rglob("*.*"):
            if path.suffix in (".py", ".js", ".css"):
                lines = len(path.read_text(encoding="utf-8").splitlines())
                assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"
