"""The program as a whole: help, exit codes, errors of one line, and what it does not import."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pytest
import typer

from clover_local.cli.app import app
from clover_local.cli.completion import described
from clover_local.cli.completion_scripts import ShellCommand

Call = Callable[..., Any]
"""A fixture that is called with the arguments of a command, or of a terminal."""

COMMANDS = ("chat", "generate", "info", "verify", "bench")


def program(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "clover_local", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_help_lists_the_commands(run: Call) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    listed = {line.split()[0] for line in outcome.out.splitlines() if line.startswith("  ")}
    assert listed.issuperset(COMMANDS)


def test_no_command_is_a_usage_error_that_shows_the_help(run: Call) -> None:
    outcome = run()
    assert outcome.code == 2
    assert "generate" in outcome.out


def test_the_version_is_shown(run: Call) -> None:
    outcome = run("--version")
    assert outcome.code == 0
    assert outcome.out.startswith("clover-local ")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("generate", "--help"), ("info", "{model}")]
)
def test_torch_is_not_imported(arguments: tuple[str, ...], golden_folder: Path) -> None:
    argv = [argument.format(model=golden_folder) for argument in arguments]
    code = (
        "import sys; from clover_local.cli.app import main\n"
        f"sys.argv = ['clover-local', *{argv!r}]\n"
        "code = main()\n"
        "loaded = {'torch', 'rich', 'prompt_toolkit', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'imported {loaded}' if loaded else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("generate",),
        ("generate", "m", "--nonsense"),
        ("generate", "m", "--top-k", "x"),
    ],
    ids=["command", "no model", "flag", "type"],
)
def test_a_wrong_call_is_one_line_and_code_2(run: Call, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments, stdin=b"text")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert "--help" in outcome.err


def test_a_known_error_is_one_line_and_code_1(run: Call) -> None:
    outcome = run("generate", "no/such/folder", "-p", "x")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


def test_an_os_error_is_one_line_with_the_file(
    run: Call, golden_folder: Path, tmp_path: Path
) -> None:
    absent = tmp_path / "absent.txt"
    outcome = run("generate", str(golden_folder), "-f", str(absent))
    assert outcome.code == 1
    assert outcome.err == (
        f"error: {absent} cannot be read (No such file or directory): pass another prompt\n"
    )


def test_an_unexpected_error_is_one_line_and_a_traceback_only_when_asked_for(
    run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("clover_local.cli.start.open_model", fail)
    outcome = run("generate", "m", "-p", "x")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "CLOVER_DEBUG=1" in outcome.err
    monkeypatch.setenv("CLOVER_DEBUG", "1")
    assert "Traceback" in run("generate", "m", "-p", "x").err


def test_ctrl_c_is_code_130(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clover_local.cli.start.open_model", interrupt)
    outcome = run("generate", "m", "-p", "x")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize("command", ["generate {model} -p x --max-new-tokens 70", "--help"])
def test_a_reader_that_leaves_causes_no_traceback(command: str, golden_folder: Path) -> None:
    line = f"{sys.executable} -m clover_local {command.format(model=golden_folder)} | head -c 1"
    done = subprocess.run(
        line,
        shell=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr
    assert len(done.stdout) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_a_closed_stdout_is_none() -> None:
    line = f"{sys.executable} -m clover_local --version"
    full = subprocess.run(f"{line} > /dev/full", shell=True, capture_output=True, timeout=120)
    assert full.returncode == 1
    assert full.stderr.startswith(b"error: No space left on device: check")
    assert full.stderr.count(b"\n") == 1
    closed = subprocess.run(f"{line} >&-", shell=True, capture_output=True, timeout=120)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_a_closed_stdin_is_an_empty_one(golden_folder: Path) -> None:
    line = f"{sys.executable} -m clover_local generate {golden_folder} <&-"
    closed = subprocess.run(line, shell=True, capture_output=True, timeout=120)
    assert closed.returncode == 1
    assert closed.stderr == b"error: the prompt is empty: pass some text\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")]
)
def test_too_little_memory_is_no_fault_of_the_program(
    run: Call, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("clover_local.cli.start.open_model", fail)
    outcome = run("generate", "m", "-p", "x")
    assert outcome.code == 1
    assert outcome.err.startswith("error: out of memory: ")


def test_a_panic_that_is_no_exception_is_one_line(
    run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):  # as Rust packages raise it
        pass

    def fail(*arguments: object, **options: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("clover_local.cli.start.open_model", fail)
    outcome = run("generate", "m", "-p", "x")
    assert outcome.code == 1
    assert "unexpected PanicException" in outcome.err


def test_the_module_runs_as_a_program() -> None:
    done = program("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("clover-local ")


def _flags(program: ShellCommand) -> dict[str, set[str]]:
    """The flags of each command that does something, by its name."""
    return {
        " ".join(command.path): {name for flag in command.flags for name in flag.names}
        for command in program.all()
        if not command.below
    }


def test_every_command_that_shows_something_has_json_and_quiet() -> None:
    flags = _flags(described(typer.main.get_command(app)))
    plain = {"completion", "config path", "config init"}  # one line, which is all there is to say
    assert {name for name, own in flags.items() if "--quiet" not in own} == plain
    assert {name for name, own in flags.items() if "--json" not in own} == {*plain, "chat"}
    strict = {"chat", "generate", "replay", "quantize", "config explain"}
    assert {name for name, own in flags.items() if "--strict" in own} == strict


@pytest.mark.parametrize(
    "line",
    [
        "generate {model} -p x --max-new-tokens 2",
        "info {model}",
        "verify {model}",
        "plan {model}",
        "ls",
        "config explain {model}",
        "export diffusion {model} {out}.diffusion.gguf",
        "imatrix {model} {out}.gguf --calibration-tokens 40",
        "simulate {trace}",
        "replay {trace}",
        "report {trace} {out}.html",
        "quantize {model} {out} --calibration-tokens 40 --evaluation-tokens 0 --group-size 32",
    ],
    ids=lambda line: line.split(" {")[0],
)
def test_json_is_one_object_and_alone_on_stdout_and_quiet_leaves_nothing_else(
    run: Call, golden_folder: Path, tmp_path: Path, trace: Path, line: str
) -> None:
    names = {"model": golden_folder, "out": tmp_path / "out", "trace": trace}
    outcome = run(*line.format(**names).split(), "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    assert isinstance(json.loads(outcome.out), dict)
    assert outcome.out.count("\n") == 1
    assert outcome.err == ""


@pytest.fixture
def trace(run: Call, golden_folder: Path, tmp_path: Path) -> Path:
    """The trace of a short answer."""
    path = tmp_path / "run.jsonl"
    arguments = ("-p", "x", "--max-new-tokens", "2", "--trace", str(path), "--quiet")
    assert run("generate", str(golden_folder), *arguments).code == 0
    return path


def test_no_color_leaves_no_colour_on_a_terminal() -> None:
    def shown(no_color: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_color}
        arguments = ["-m", "clover_local", "rm", "not/there"]
        child = pexpect.spawn(
            sys.executable, arguments, env=environment, encoding="utf-8", timeout=120
        )
        child.expect(pexpect.EOF)
        return str(child.before)

    assert "\x1b[1;31merror:" in shown("")
    assert shown("1").startswith("error: ")
