"""Manifests: equal ones, and the first thing that differs."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.errors import CheckpointError
from clover_local.quant.pipeline.manifest import (
    Manifest,
    arguments_of,
    difference,
    hash_files,
    parse_manifest,
)
from clover_local.quant.profiles import Recipe

MakeRecipe = Callable[..., Recipe]
MANIFEST = Manifest(
    source={"a.safetensors": "11", "config.json": "22"},
    arguments={"method": "gptq", "group_size": 64},
    calibration="33",
)


def test_manifest_is_read_back_equal() -> None:
    assert parse_manifest(MANIFEST.to_json(), "a file") == MANIFEST
    assert difference(MANIFEST, parse_manifest(MANIFEST.to_json(), "a file")) is None


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (
            replace(MANIFEST, arguments={"method": "gptq", "group_size": 32}),
            "made with group_size 64, not 32",
        ),
        (
            replace(MANIFEST, arguments={"method": "import of gptq"}),
            "made with group_size 64, not nothing",
        ),
        (
            replace(MANIFEST, source={"a.safetensors": "12", "config.json": "22"}),
            "made from another source (a.safetensors differs)",
        ),
        (
            replace(MANIFEST, source={"config.json": "22"}),
            "made from another source (a.safetensors differs)",
        ),
        (replace(MANIFEST, calibration="34"), "made with another calibration text"),
        (replace(MANIFEST, version=2), "made by another version of clover-local (format 1)"),
    ],
    ids=["argument", "import", "changed", "removed", "text", "version"],
)
def test_first_difference_is_named(now: Manifest, what: str) -> None:
    assert difference(MANIFEST, now) == what


def test_recipe_becomes_plain_values(make_recipe: MakeRecipe) -> None:
    arguments = arguments_of(make_recipe(method="rtn"))
    assert arguments["method"] == "rtn"
    assert all(isinstance(value, str | int | float | None) for value in arguments.values())


def test_files_are_hashed_with_progress(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"y" * 5)
    seen: list[tuple[int, int]] = []
    hashes = hash_files([tmp_path / "a", tmp_path / "b"], lambda *now: seen.append(now))
    assert hashes["b"] == hashlib.sha256(b"yyyyy").hexdigest()
    assert seen == [(10, 15), (15, 15)]


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent cannot be read"):
        hash_files([tmp_path / "absent"])
