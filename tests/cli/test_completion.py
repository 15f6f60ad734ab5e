"""Completion scripts: bash's is run, the others are checked where there is such a shell."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from clover_local.cli.app import app
from clover_local.cli.completion import SCRIPTS, described
from clover_local.cli.completion_scripts import ShellCommand, bash
from clover_local.decoding.keys import KEYS, MODES, SAMPLERS

Call = Callable[..., Any]
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(scope="module")
def program() -> ShellCommand:
    return described(typer.main.get_command(app))


@pytest.fixture(scope="module")
def place(program: ShellCommand, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, a few files, and a hub cache of two models."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "script").write_text(bash(program), encoding="utf-8")
    here = folder / "here"
    (here / "a folder").mkdir(parents=True)
    for name in ("x.gguf", "y.txt"):
        (here / name).touch()
    for name in ("owner--some--name", "theirs--other"):
        (folder / "cache" / "hub" / f"models--{name}" / "snapshots").mkdir(parents=True)
    (folder / "cache" / "hub" / "models--half--there").mkdir()
    return folder


def completed(place: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words after `clover-local`."""
    script = (
        'source "$1"; shift; COMP_WORDS=(clover-local "$@"); COMP_CWORD=$#; _clover_local; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", script, "bash", str(place / "script"), *words],
        capture_output=True,
        text=True,
        cwd=place / "here",
        env={"PATH": os.environ["PATH"], "HOME": str(place), "HF_HOME": str(place / "cache")},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(filter(None, done.stdout.split("\n")))


MODELS = ["a folder", "demo", "owner/some--name", "theirs/other", "x.gguf"]


@needs_bash
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["gen"], ["generate"]),
        (["p"], ["plan", "pull"]),
        (["zzz"], []),
        (["--v"], ["--version"]),
        (["chat", ""], MODELS),
        (["chat", "own"], ["owner/some--name"]),
        (["chat", "demo", ""], []),
        (["chat", "--temp"], ["--temperature"]),
        (["chat", "--mode", ""], sorted(MODES)),
        (["chat", "--mode", "d"], ["denoise", "draft"]),
        (["chat", "--mode", "="], sorted(MODES)),
        (["chat", "--mode", "=", "de"], ["denoise"]),
        (["generate", "demo", "--sampler", ""], sorted(SAMPLERS)),
        (["generate", "--sampler", "margin", ""], MODELS),
        (["generate", "--mode", "=", "ar", ""], MODELS),
        (["generate", "--quiet", "d"], ["demo"]),
        (["generate", "demo", "--policy", "lf"], ["lfru", "lfu"]),
        (["generate", "demo", "-f", ""], ["a folder", "x.gguf", "y.txt"]),
        (["generate", "demo", "--prompt", ""], []),
        (["quantize", "demo", "y"], ["y.txt"]),
        (["evaluate", "demo", "--against", "t"], ["theirs/other"]),
        (["replay", ""], ["a folder", "x.gguf", "y.txt"]),
        (["rm", ""], ["owner/some--name", "theirs/other"]),
        (["export", ""], ["diffusion", "gguf"]),
        (["export", "gguf", "x"], ["x.gguf"]),
        (["export", "gguf", "demo", "out", "--type", "Q8"], ["Q8_0"]),
        (["config", "e"], ["explain"]),
        (["config", "explain", "de"], ["demo"]),
        (["completion", ""], sorted(SCRIPTS)),
    ],
    ids=" ".join,
)
def test_bash_completes(place: Path, words: list[str], found: list[str]) -> None:
    assert completed(place, *words) == found


@needs_bash
def test_bash_knows_every_flag_of_every_setting(place: Path) -> None:
    for command in ("chat", "generate"):
        flags = completed(place, command, "--")
        assert {f"--{key.replace('_', '-')}" for key in KEYS} <= {*flags}
        assert "--help" in flags


NASTY = [
    "models--a--$(touch${IFS}pw)",
    "models--a--`touch pw`",
    "models--a--two words",
    "models--a--star*",
    "models--a--$HOME",
    "models--a--semi;touch pw",
]


@pytest.fixture
def nasty(place: Path, tmp_path: Path) -> Path:
    """The script beside a cache and a folder whose names a shell would expand."""
    shutil.copy(place / "script", tmp_path / "script")
    for name in NASTY:
        (tmp_path / "cache" / "hub" / name / "snapshots").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for name in ("$(touch pw).gguf", "two words.gguf", "t*.gguf"):
        (tmp_path / "here" / name).touch()
    return tmp_path


@needs_bash
@pytest.mark.parametrize("words", [["rm"], ["pull"]], ids=" ".join)
def test_bash_takes_the_names_in_the_cache_as_they_are(nasty: Path, words: list[str]) -> None:
    found = completed(nasty, *words, "a/")
    typed = f"printf '%s\\n' {' '.join(found)}"  # what is completed means the name itself
    done = subprocess.run(
        ["bash", "-c", typed], capture_output=True, text=True, cwd=nasty / "here", timeout=60
    )
    assert sorted(done.stdout.splitlines()) == sorted(
        name.removeprefix("models--").replace("--", "/") for name in NASTY
    )
    assert completed(nasty, *words, "a/two w") == completed(nasty, *words, "a/two\\ w")
    assert completed(nasty, *words, "a/two w") == ["a/two\\ words"]
    completed(nasty, *words, "a/$(touch pw)")
    assert not list(nasty.rglob("pw"))


@needs_bash
@pytest.mark.parametrize("words", [["chat"], ["evaluate", "demo", "--against"]], ids=" ".join)
def test_bash_offers_no_model_whose_name_is_none_of_the_hub(nasty: Path, words: list[str]) -> None:
    (nasty / "cache" / "hub" / "models--a--right.1_B" / "snapshots").mkdir(parents=True)
    assert completed(nasty, *words, "a/") == ["a/right.1_B"]
    assert not list(nasty.rglob("pw"))


@needs_bash
@pytest.mark.parametrize("words", [["chat"], ["replay"]], ids=" ".join)
def test_bash_takes_the_names_of_files_as_they_are(nasty: Path, words: list[str]) -> None:
    assert completed(nasty, *words, "t") == ["t*.gguf", "two words.gguf"]
    assert completed(nasty, *words, "$") == ["$(touch pw).gguf"]
    assert not list(nasty.rglob("pw"))


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_lines_that_install_a_script_can_be_pasted(run: Call, shell: str) -> None:
    script = run("completion", shell).out.splitlines()
    make, write = (
        next(line.removeprefix("#   ") for line in script if line.startswith(f"#   {start}"))
        for start in ("mkdir -p ", f"clover-local completion {shell} > ")
    )
    assert str(Path(write.split(" > ")[1]).parent) == make.removeprefix("mkdir -p ")
    shown = [line.strip() for line in run("completion", "--help").out.splitlines()]
    assert shown[shown.index(make) + 1] == write


@needs_bash
def test_the_pasted_lines_install_the_script(run: Call, tmp_path: Path) -> None:
    script = run("completion", "bash").out
    lines = [line[4:] for line in script.splitlines() if line.startswith("#   ")]
    program = 'clover-local() { printf "%s" "$*"; }\n' + "\n".join(lines[:2])
    subprocess.run(
        ["bash", "-c", program],
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        timeout=60,
    )
    written = tmp_path / ".local/share/bash-completion/completions/clover-local"
    assert written.read_text(encoding="utf-8") == "completion bash"


def test_a_script_knows_every_command_and_needs_no_python(run: Call, program: ShellCommand) -> None:
    for shell in SCRIPTS:
        outcome = run("completion", shell)
        assert (outcome.code, outcome.err) == (0, "")
        for command in program.all():
            assert not command.path or command.name in outcome.out
        assert "python" not in outcome.out
    assert run("completion", "tcsh").code == 2


@pytest.mark.parametrize(
    ("shell", "check"),
    [("bash", ("-n",)), ("zsh", ("-n",)), ("fish", ("--no-execute",))],
    ids=SCRIPTS,
)
def test_the_syntax_is_the_shells(
    run: Call, tmp_path: Path, shell: str, check: tuple[str, ...]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path / "script"
    script.write_text(run("completion", shell).out, encoding="utf-8")
    done = subprocess.run([shell, *check, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes(run: Call, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(run("completion", "fish").out, encoding="utf-8")
    command = f"source {script}; complete -C 'clover-local generate --mode '"
    done = subprocess.run(["fish", "-c", command], capture_output=True, text=True, timeout=60)
    assert sorted(line.split("\t")[0] for line in done.stdout.splitlines()) == sorted(MODES)


def test_quotes_and_brackets_in_help_do_not_end_a_string(run: Call) -> None:
    assert "MODEL'\\''s importance matrix" in run("completion", "zsh").out
    assert "MODEL\\'s importance matrix" in run("completion", "fish").out
