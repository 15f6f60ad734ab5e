"""The browser of `make test`: there already, or fetched, or a line that says why there is none."""

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.conftest import RECIPES

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="fetches none here"
)
Call = Callable[..., "subprocess.CompletedProcess[str]"]
FOLDER = "made/browser"


@pytest.fixture
def get(tmp_path: Path) -> Call:
    """Runs the recipe where nothing is installed but programs of these shell commands."""

    def get(*options: str, **programs: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "bin").mkdir()
        for name, commands in programs.items():
            program = tmp_path / "bin" / name
            program.write_text(f"#!/bin/sh\n{commands}\n", encoding="utf-8")
            program.chmod(0o755)
        command = [sys.executable, str(RECIPES / "get_browser.py"), FOLDER, *options]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": str(tmp_path / "bin")},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return get


def test_an_installed_browser_is_enough(get: Call, tmp_path: Path) -> None:
    done = get(chromium="exit 0", node="exit 1", npm="echo npm > asked")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [*tmp_path.rglob("asked")]


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--if-possible",), 0)])
def test_without_a_network_one_line_says_so(
    options: tuple[str, ...], code: int, get: Call, tmp_path: Path
) -> None:
    done = get(*options, node="exit 0", npm="echo no network >&2; exit 1")
    assert (done.returncode, done.stderr) == (code, "")
    (line,) = done.stdout.splitlines()
    assert "chromium@153.0.0 could not be fetched" in line and "install Chrome" in line
    assert [*(tmp_path / "made").iterdir()] == []


def test_another_archive_than_the_pinned_one_is_always_an_error(get: Call, tmp_path: Path) -> None:
    done = get("--if-possible", node="echo ran > ran", npm="echo other > chromium.tgz")
    assert done.returncode == 1
    assert "chromium.tgz has SHA-256" in done.stdout
    assert [*(tmp_path / "made").iterdir()] == []
