"""The wheel holds every module under `clover_local/` and no name of another package."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clover_local.traces.page import SCRIPTS

ROOT = Path(__file__).parents[1]
MAPPED = ("kernels", "quant", "calibration_data")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel built from a copy of the tree (a build leaves files beside the sources)."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("clover_local", *MAPPED):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tree)]
    build += ["--outdir", str(folder)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_module_is_in_the_wheel(wheel_names: set[str]) -> None:
    for folder in ("clover_local", *MAPPED):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            wanted = relative if folder == "clover_local" else f"clover_local/{relative}"
            assert wanted in wheel_names


def test_the_demo_model_is_in_the_wheel(wheel_names: set[str]) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert f"clover_local/demo/{name}" in wheel_names


def test_the_parts_of_the_report_are_in_the_wheel(wheel_names: set[str]) -> None:
    for name in ("report.css", *SCRIPTS):
        assert f"clover_local/traces/{name}" in wheel_names


def test_no_other_top_level_name_is_in_the_wheel(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"clover_local"}
