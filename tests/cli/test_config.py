"""`clover-local config`, and what config file and environment do to the other commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.cli import chat as chat_command
from clover_local.cli import commands
from clover_local.cli.preferences import ALL_KEYS, FILE_VARIABLE
from clover_local.cli.talk import ChatState

Call = Callable[..., Any]
SetUp = Callable[[str], Path]


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Writes the config file that counts from then on."""

    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv(FILE_VARIABLE, str(path))
        return path

    return write


def explained(run: Call, *arguments: str) -> dict[str, tuple[object, str, str | None]]:
    """(value, source, effect) by key, as `config explain --json` says."""
    outcome = run("config", "explain", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)["values"]
    return {row["key"]: (row["value"], row["source"], row["effect"]) for row in rows}


def test_every_key_has_a_row_with_its_place_in_the_order_of_precedence(
    run: Call, golden_folder: Path, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(set_up("threshold = 0.5\nseed = 1\ntemperature = 0.5\ncontext = 100"))
    monkeypatch.setenv("CLOVER_SEED", "2")
    monkeypatch.setenv("CLOVER_TEMPERATURE", "0.6")
    rows = explained(run, str(golden_folder), "--temperature", "0.7", "--expert-slots", "9")
    assert list(rows) == list(ALL_KEYS)
    assert rows["max_new_tokens"] == (2048, "default", None)
    assert rows["threshold"] == (0.5, path, None)
    assert rows["context"] == (100, path, None)
    assert rows["seed"] == (2, "CLOVER_SEED", None)
    assert rows["temperature"] == (0.7, "flag", None)
    assert rows["expert_slots"] == (9, "flag", None)
    assert rows["model"] == (str(golden_folder), "argument", None)
    assert rows["device"] == (None, "default", None)


def test_the_table_says_the_same_for_people(run: Call, golden_folder: Path, set_up: SetUp) -> None:
    path = set_up("mode = 'ar'\nthreshold = 0.5")
    outcome = run("config", "explain", str(golden_folder))
    title, *lines = outcome.out.splitlines()
    assert title == f"{golden_folder}; {path}"
    rows = {line.split()[0]: line.split(maxsplit=3) for line in lines}
    assert rows["mode"][1:] == ["ar", str(path)]
    assert rows["threshold"][1:] == ["0.5", str(path), "no effect in mode ar"]


def test_without_a_model_it_is_the_configured_one_or_the_demo(
    run: Call, golden_folder: Path, set_up: SetUp
) -> None:
    assert explained(run)["model"] == ("demo", "default", None)
    assert explained(run)["length_penalty"][1] == "generation_config.json"
    path = set_up(f"model = '{golden_folder}'")
    assert explained(run)["model"] == (str(golden_folder), str(path), None)


def test_a_model_that_has_only_its_configs_is_explained(
    run: Call, golden_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((golden_folder / "config.json").read_bytes())
    assert explained(run, str(tmp_path))["threshold"][1] == "config.json"


def test_thinking_is_explained_as_a_chat_has_it(
    run: Call, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = explained(run, "--think-budget", "20")
    assert (rows["think"], rows["think_budget"]) == ((True, "flag", None), (20, "flag", None))
    assert rows["think_end_start"][:2] == (20, "flag")
    path = str(set_up("think_budget = 5"))
    rows = explained(run)
    assert (rows["think"], rows["think_budget"]) == ((True, path, None), (5, path, None))
    rows = explained(run, "--no-think")
    assert rows["think"] == (False, "flag", None)
    assert rows["think_budget"] == (5, path, "no effect while think is off")
    assert rows["think_end_bias"][1] == "generation_config.json"
    outcome = run("config", "explain", "--no-think", "--think-budget", "5")
    assert (outcome.code, outcome.out) == (2, "")
    outcome = run("chat", "demo", stdin=b"/show think\n/think off\n/show think\n")
    assert outcome.out.splitlines() == [
        f"think = on, for 5 tokens at most ({path})",
        "think: off",
        "think = off (/think)",
    ]


def test_explain_does_not_load_torch() -> None:
    code = (
        "import sys; from clover_local.cli.app import main\n"
        "sys.argv = ['clover-local', 'config', 'explain']\n"
        "sys.exit(main() or str({'torch', 'rich', 'numpy'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_init_writes_comments_and_never_over_another_file(
    run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "c.toml"
    monkeypatch.setenv(FILE_VARIABLE, str(target))
    assert run("config", "path").out == f"{target}\n"
    assert run("config", "init").out == f"wrote {target}\n"
    before = target.read_bytes()
    assert b"#threshold = 0.95" in before
    assert explained(run)["threshold"][1] == "config.json"
    outcome = run("config", "init")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "is there already" in outcome.err
    assert target.read_bytes() == before
    monkeypatch.setenv(FILE_VARIABLE, os.devnull)
    assert "there is no config file" in run("config", "init").err


def test_an_answer_obeys_file_and_environment_and_flags_are_above(
    run: Call, golden_folder: Path, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ("generate", str(golden_folder), "-p", "hello")
    set_up("max_new_tokens = 3\nmode = 'ar'\nquiet = true")
    shown = json.loads(run(*generate, "--json").out)
    assert (shown["mode"], len(shown["token_ids"])) == ("ar", 3)
    monkeypatch.setenv("CLOVER_MAX_NEW_TOKENS", "4")
    outcome = run(*generate, "--json")
    assert (len(json.loads(outcome.out)["token_ids"]), outcome.err) == (4, "")
    outcome = run(*generate, "--json", "--max-new-tokens", "5", "--no-quiet")
    assert len(json.loads(outcome.out)["token_ids"]) == 5
    assert "loading" in outcome.err


def test_a_default_without_effect_is_not_nagged_about_and_a_flag_is(
    run: Call, golden_folder: Path, set_up: SetUp
) -> None:
    generate = ("generate", str(golden_folder), "-p", "x", "--max-new-tokens", "1", "--strict")
    set_up("top_k = 5\ndraft_width = 8\npolicy = 'lru'\nsystem = 'Be brief.'\nheat = true")
    assert run(*generate, "--raw", "--json").code == 0
    refused = run(*generate, "--top-p", "0.5")
    assert refused.code == 1
    assert "--top-p has no effect" in refused.err
    assert "top-k" not in refused.err


def test_a_strict_default_counts_and_may_be_taken_back(
    run: Call, golden_folder: Path, set_up: SetUp
) -> None:
    generate = ("generate", str(golden_folder), "-p", "x", "--max-new-tokens", "1", "--top-k", "5")
    set_up("strict = true")
    assert run(*generate).code == 1
    assert run(*generate, "--no-strict").code == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("context = 100000000", "exceeds the model's"),
        ("expert_slots = 100000", "this model can have"),
        ("device = 'cuda'", "sees no CUDA device"),
        ("model = 'no-such-model'", "there is no folder 'no-such-model'"),
        ("suppress = [100000]", "names the token id 100000"),
        ("context = 20", "raise --context or shorten the prompt"),
        ("gpu_memory = '1MiB'", "on the device (--gpu-memory)"),
        ("policy = 'static'", "pass --expert-profile FILE"),
    ],
)
def test_what_a_model_cannot_obey_names_the_place_it_came_from(
    run: Call, golden_folder: Path, set_up: SetUp, line: str, words: str
) -> None:
    path = set_up(line)
    model = [] if line.startswith("model") else [str(golden_folder)]
    outcome = run("chat", *model, "-p", "x" * 40)
    error = outcome.err.splitlines()[-1]
    assert (outcome.code, error.count("error:")) == (1, 1)
    assert words in error
    assert error.count(str(path)) == 1


def test_a_typed_flag_is_not_said_to_come_from_a_file(
    run: Call, golden_folder: Path, set_up: SetUp
) -> None:
    set_up("device = 'cpu'\nmodel = 'demo'\ngpu_memory = '1GB'")
    outcome = run("chat", str(golden_folder), "-p", "x", "--context", "100000000")
    assert outcome.err.splitlines()[-1].endswith("pass at most that")


def test_a_flag_mends_a_default_that_the_model_cannot_obey(
    run: Call, golden_folder: Path, set_up: SetUp
) -> None:
    set_up("context = 100000000\nsuppress = [100000]")
    arguments = ("--context", "100", "--suppress", "none", "--max-new-tokens", "1")
    assert run("chat", str(golden_folder), "-p", "x", *arguments).code == 0


def test_an_unknown_variable_is_a_note_and_with_strict_an_error(
    run: Call, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_TRESHOLD", "0.5")
    generate = ("generate", str(golden_folder), "-p", "x", "--max-new-tokens", "1")
    outcome = run(*generate)
    assert outcome.code == 0
    assert "did you mean CLOVER_THRESHOLD?" in outcome.err.splitlines()[0]
    outcome = run(*generate, "--strict")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)


@pytest.mark.parametrize("command", ["ls", "plan", "info", "verify", "pull", "doctor", "generate"])
def test_a_mistyped_variable_is_noted_once_by_every_command(
    run: Call, golden_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CLOVER_TRESHOLD", "0.5")
    rest = {
        "ls": (),
        "doctor": (),
        "pull": ("demo",),
        "generate": (str(golden_folder), "-p", "x", "--max-new-tokens", "1"),
    }.get(command, (str(golden_folder),))
    outcome = run(command, *rest)
    assert outcome.err.count("CLOVER_TRESHOLD is no setting of clover-local") == 1
    assert "CLOVER_TRESHOLD" not in run(command, *rest, "--quiet").err
    assert "CLOVER_TRESHOLD" not in run("completion", "bash").err


def test_a_strict_default_counts_for_variables_too_and_flags_have_no_order(
    run: Call, golden_folder: Path, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ("generate", str(golden_folder), "-p", "x", "--max-new-tokens", "1")
    monkeypatch.setenv("CLOVER_TRESHOLD", "0.5")
    for flags in (("--no-quiet", "--strict"), ("--strict", "--no-quiet"), ("-q", "--strict")):
        outcome = run(*generate, *flags)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert "drop --strict" in outcome.err
    set_up("strict = true")
    assert run(*generate).code == 1
    assert run(*generate, "--no-strict").code == 0


def test_a_broken_file_is_one_line_and_help_works_with_it(run: Call, set_up: SetUp) -> None:
    set_up("treshold = 1")
    for arguments in (("ls",), ("config", "explain"), ("chat", "-p", "x")):
        outcome = run(*arguments)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert "did you mean threshold?" in outcome.err
    for arguments in (("chat", "--help"), ("config", "path"), ("--version",)):
        assert run(*arguments).code == 0


def test_kernels_that_do_not_exist_are_refused_before_a_model_is_looked_for(
    run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_KERNELS", "fast")
    for command in (("chat", "no/model"), ("generate", "no/model", "-p", "x"), ("bench",)):
        outcome = run(*command)
        assert (outcome.code, outcome.err.count("\n")) == (1, 1)
        assert "CLOVER_KERNELS=fast: the choices are reference and triton" in outcome.err


def test_show_names_file_and_variable_and_a_session_keeps_the_values(
    run: Call,
    golden_folder: Path,
    tmp_path: Path,
    set_up: SetUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(chat_command, "DEMO", str(golden_folder))
    path = set_up("max_new_tokens = 3\nwatch = 'heat'")
    monkeypatch.setenv("CLOVER_SYSTEM", "Be brief.")
    monkeypatch.setenv("CLOVER_THRESHOLD", "0.7")
    outcome = run("chat", stdin=b"/show\n/save one\n/set threshold 0.6\n/load one\n/show\n")
    assert outcome.code == 0, outcome.err
    first, _, second = outcome.out.partition("saved ")
    rows = {line.split()[0]: line.split() for line in first.splitlines()}
    assert rows["max_new_tokens"][1:] == ["3", str(path)]
    assert rows["threshold"][1:] == ["0.7", "CLOVER_THRESHOLD"]
    assert rows["system"][-1] == "CLOVER_SYSTEM"
    assert rows["watch"][1:] == ["heat", str(path)]
    rows = {line.split()[0]: line.split() for line in second.splitlines()}
    assert rows["max_new_tokens"][1:] == ["3", "session", "one"]
    assert rows["threshold"][1:] == ["0.7", "session", "one"]


def test_another_model_keeps_the_places(chat: ChatState, golden_folder: Path) -> None:
    from clover_local.session import load

    chat.load = lambda opened, resolved: load(opened, resolved.settings, device="cpu")
    chat.resolved = chat.resolved.with_values({"top_k": 5}, source="CLOVER_TOP_K")
    commands.execute(f"/model {golden_folder}", chat)
    assert chat.resolved.sources["top_k"] == "CLOVER_TOP_K"
