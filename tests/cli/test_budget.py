"""`--think-budget`: settings that end a thinking."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clover_local.cli.budget import budget, limit
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
