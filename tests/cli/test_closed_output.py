"""Output whose reader leaves early (`| head -1`) ends a command quietly."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs SIGPIPE")

CLOSED: dict[str, tuple[tuple[str, ...], bytes]] = {
    "help": (("--help",), b""),
    "help of a command": (("chat", "--help"), b""),
    "ls": (("ls",), b""),
    "generate": (("generate", "demo", "-p", "Count from 1 to 30."), b""),
    "one answer": (("chat", "-p", "Count from 1 to 30."), b""),
    "lines": (("chat",), b"Count from 1 to 30.\n" * 20),
}


@pytest.fixture(scope="module")
def closed_early(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """(exit code, stderr) of each of `CLOSED` whose reader left after a byte; all at once."""
    folder = tmp_path_factory.mktemp("closed")
    environment = {**os.environ, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    running: dict[str, Any] = {}
    for name, (arguments, text) in CLOSED.items():
        (folder / "stdin").write_bytes(text)
        with (folder / "stdin").open("rb") as stdin:
            running[name] = subprocess.Popen(
                [sys.executable, "-m", "clover_local", *arguments],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                bufsize=0,
            )
        if name == "ls":
            running[name].stdout.close()
    for name, process in running.items():
        if name != "ls":
            process.stdout.read(1)
            process.stdout.close()
    return {
        name: (process.wait(), process.stderr.read().decode()) for name, process in running.items()
    }


@pytest.mark.parametrize("name", CLOSED)
def test_a_reader_that_leaves_early_is_no_error(
    closed_early: dict[str, tuple[int, str]], name: str
) -> None:
    code, said = closed_early[name]
    assert code in (0, 128 + signal.SIGPIPE)
    assert "Traceback" not in said
    assert "Error" not in said
    assert "error:" not in said
