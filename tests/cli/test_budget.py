"""`--think-budget`: settings that end a thinking."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from clover_local.cli.budget import budget, limit, thinks
from clover_local.cli.preferences import FILE_VARIABLE
from clover_local.cli.talk import ChatState
from clover_local.session import open_model

Call = Callable[..., Any]
"""A fixture that is called with the arguments of a command."""

QUESTION = ("-p", "What is 17 + 26?", "--quiet")


def test_a_budget_is_found_again_in_the_settings(chat: ChatState) -> None:
    resolved = chat.resolved.with_values(budget(5), source="flag")
    assert limit(chat.resolved.settings) is None
    assert limit(resolved.settings) == 5
    assert limit(resolved.with_value("think_end_bias", "1").settings) is None


def test_a_budget_is_a_short_form_of_flags(run: Call) -> None:
    short = run("generate", "demo", *QUESTION, "--think-budget", "8", "--json")
    long = [
        "--think",
        "--think-end-bias",
        "100",
        "--think-end-start",
        "8",
        "--think-end-window",
        "1",
    ]
    written_out = run("generate", "demo", *QUESTION, *long, "--json")
    ids = json.loads(short.out)["token_ids"]
    assert ids == json.loads(written_out.out)["token_ids"]
    demo = open_model("demo")
    assert ids.index(demo.generation.dllm_think_end_token_id) == 8
    chat = run("chat", "demo", *QUESTION, "--think-budget", "8")
    assert chat.code == 0
    assert chat.out.strip()


FILE, VARIABLE = "/home/me/config.toml", "CLOVER_THINK"


@pytest.mark.parametrize(
    ("think", "tokens", "places", "on", "budget"),
    [
        (None, None, (None, None), None, None),
        (None, 5, (None, FILE), True, 5),
        (True, 5, (FILE, "flag"), True, 5),
        (False, None, ("flag", None), False, None),
        (False, 5, ("flag", FILE), False, None),
        (False, 5, ("flag", VARIABLE), False, None),
        (False, 5, (FILE, "flag"), True, 5),
        (False, 5, (FILE, VARIABLE), True, 5),
        (False, 5, (VARIABLE, FILE), False, None),
        (False, 5, (FILE, FILE), False, None),
    ],
)
def test_of_two_that_exclude_each_other_the_stronger_place_counts(
    think: bool | None,
    tokens: int | None,
    places: tuple[str | None, str | None],
    on: bool | None,
    budget: int | None,
) -> None:
    names = ("think", "think_budget")
    origins = {name: place for name, place in zip(names, places, strict=True) if place}
    found = thinks(think, tokens, origins)
    assert (found.on, found.budget) == (on, budget)
    assert (found.place is None) == (on is None)


def test_two_flags_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="exclude each other"):
        thinks(False, 5, {"think": "flag", "think_budget": "flag"})


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_flag_takes_a_budget_of_the_config_file_back(
    run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("think_budget = 5\nmax_new_tokens = 40", encoding="utf-8")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    thinking = run(command, "demo", *QUESTION)
    assert thinking.code == 0
    without = run(command, "demo", *QUESTION, "--no-think")
    assert without.code == 0, without.err
    monkeypatch.setenv(FILE_VARIABLE, os.devnull)
    plain = run(command, "demo", *QUESTION, "--no-think", "--max-new-tokens", "40")
    assert without.out == plain.out


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_budget_that_cannot_hold_is_one_line(run: Call, model_folder: Path, command: str) -> None:
    outcome = run(command, "demo", *QUESTION, "--no-think", "--think-budget", "8")
    assert (outcome.code, outcome.out) == (2, "")
    assert "exclude each other" in outcome.err
    assert run(command, "demo", *QUESTION, "--think-budget", "0").code == 2
    path = model_folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8"))
    del generation["dllm_think_end_token_id"]
    path.write_text(json.dumps(generation), encoding="utf-8")
    outcome = run(command, str(model_folder), *QUESTION, "--think-budget", "8")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert "--think-budget 8 needs a token that ends the thinking" in outcome.err
