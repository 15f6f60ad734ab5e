"""`clover-local generate` on the golden checkpoint."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clover_local.cli.console import printable
from clover_local.decoding.events import EventStream
from clover_local.generate import Generator

Call = Callable[..., Any]
"""A fixture that is called with the arguments of a command, or of a terminal."""

KEYS = {
    "text": str,
    "token_ids": list,
    "prompt_tokens": int,
    "finish_reason": str,
    "mode": str,
    "blocks": list,
    "rounds": list,
    "confidence": list,
    "stats": dict,
}
STATS = [
    "forwards",
    "previews",
    "commits",
    "tokens_per_forward",
    "tokens_per_preview",
    "ms_per_preview",
    "ms_per_commit",
    "prompt_tokens_per_second",
    "tokens_per_second",
    "distinct_experts_per_layer",
    "hit_rate",
    "bytes_from_host",
    "device_peak_bytes",
    "host_peak_bytes",
]


@pytest.fixture
def answer(run: Call, golden_folder: Path) -> Callable[..., dict[str, Any]]:
    """Runs `generate MODEL ... --json` and returns the object."""

    def answer(*arguments: str, stdin: bytes | None = None) -> dict[str, Any]:
        outcome = run("generate", str(golden_folder), "--json", *arguments, stdin=stdin)
        assert outcome.code == 0, outcome.err
        value: dict[str, Any] = json.loads(outcome.out)
        return value

    return answer


def test_json_has_exactly_the_documented_keys(answer: Call) -> None:
    result = answer("-p", "hello", "--max-new-tokens", "33")
    assert {key: type(value) for key, value in result.items()} == KEYS
    assert list(result["stats"]) == STATS
    assert set(result["blocks"][0]) == {"start", "tokens", "passes", "fixed"}
    assert [len(block["tokens"]) for block in result["blocks"]] == [32, 1]
    assert len(result["confidence"]) == len(result["token_ids"]) == 33


@pytest.mark.parametrize("name", ["parallel", "penalties", "ar", "ar_penalties"])
def test_a_golden_run_comes_out_of_flags(
    answer: Call, name: str, golden_cases: Mapping[str, Any]
) -> None:
    case = next(run for run in golden_cases["runs"] if run["name"] == name)
    flags = {key: case[key] for key in ("mode", "max_new_tokens", "threshold") if key in case}
    flags |= {
        key.removeprefix("dllm_"): value
        for key, value in case["generation_config"].items()
        if not key.endswith("_id")
    }
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    result = answer("--prompt-ids", ",".join(map(str, golden_cases["prompt"])), *arguments)
    assert result["token_ids"] == case["tokens"]
    assert [block["passes"] for block in result["blocks"]] == case.get("passes", [])
    assert result["prompt_tokens"] == len(golden_cases["prompt"])


def test_stdout_holds_the_text_and_nothing_else(
    run: Call, answer: Call, golden_folder: Path
) -> None:
    arguments = ("-p", "hello", "--max-new-tokens", "40")
    outcome = run("generate", str(golden_folder), *arguments)
    assert outcome.out == answer(*arguments)["text"] + "\n"


def test_file_pipe_and_flag_ask_the_same(answer: Call, tmp_path: Path) -> None:
    file = tmp_path / "question.txt"
    file.write_text("what is 1 + 1?\n", encoding="utf-8")
    short = ("--max-new-tokens", "3")
    asked = answer("-p", "what is 1 + 1?", *short)
    assert answer("-f", str(file), *short)["token_ids"] == asked["token_ids"]
    assert answer(*short, stdin=b"what is 1 + 1?\r\n")["token_ids"] == asked["token_ids"]
    assert (
        answer("-f", "-", *short, stdin=b"what is 1 + 1?")["prompt_tokens"]
        == (asked["prompt_tokens"])
    )


def test_raw_leaves_the_template_and_the_last_newline_alone(answer: Call) -> None:
    assert answer("--raw", "--max-new-tokens", "1", stdin=b"abc\n")["prompt_tokens"] == 4


def test_the_system_prompt_lengthens_the_prompt(answer: Call) -> None:
    short = ("-p", "x", "--max-new-tokens", "1")
    with_system = answer(*short, "--system", "Be brief.")["prompt_tokens"]
    assert with_system > answer(*short)["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-p", " "), "empty"),
        (("-p", "x", "--sampler", "nonsense"), "threshold"),
        (("-p", "x", "--mode", "drafts"), "denoise, ar"),
        (("-p", "x", "--threshold", "1.5"), "from 0 to 1"),
        (("-p", "x", "--device", "tpu"), "cpu or cuda"),
        (("-p", "x", "--dtype", "int3"), "float32 or bfloat16"),
        (("-p", "x", "--context", "131073"), "131072"),
        (("-p", "x" * 100, "--context", "64"), "context holds 64"),
        (("--prompt-ids", "1,two"), "1,2,3"),
        (("--prompt-ids", "1,512"), "512"),
        (("--prompt-ids", "1,-2"), "-2"),
        (("-p", "x", "--think-end-bias", "1", "--suppress", "600"), "600"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_code_1(
    run: Call, golden_folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    outcome = run("generate", str(golden_folder), "--quiet", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.count("\n") == 1
    assert words in outcome.err


@pytest.mark.parametrize("source", ["pipe", "file"])
def test_text_that_is_no_utf_8_is_refused(
    run: Call, golden_folder: Path, tmp_path: Path, source: str
) -> None:
    content = "caf\u00e9".encode("latin-1")
    (tmp_path / "latin.txt").write_bytes(content)
    arguments = ("-f", str(tmp_path / "latin.txt")) if source == "file" else ()
    outcome = run("generate", str(golden_folder), *arguments, stdin=content)
    assert outcome.code == 1
    assert "not UTF-8" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [((), None), (("-p", "x", "-f", "y"), None), (("-p", "x", "--prompt-ids", "1"), None)],
    ids=["nothing", "text and file", "text and ids"],
)
def test_no_prompt_or_two_are_a_usage_error(
    run: Call, golden_folder: Path, arguments: tuple[str, ...], stdin: bytes | None
) -> None:
    outcome = run("generate", str(golden_folder), *arguments, stdin=stdin)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1


def test_a_flag_without_effect_is_noted_and_with_strict_refused(
    run: Call, golden_folder: Path
) -> None:
    arguments = (
        "generate",
        str(golden_folder),
        "-p",
        "x",
        "--max-new-tokens",
        "1",
        "--top-p",
        "0.5",
    )
    outcome = run(*arguments)
    assert outcome.code == 0
    assert "--top-p has no effect" in outcome.err
    outcome = run(*arguments, "--strict")
    assert (outcome.code, outcome.out) == (1, "")
    assert "--top-p has no effect" in outcome.err


def test_quiet_leaves_stderr_empty(run: Call, golden_folder: Path) -> None:
    outcome = run(
        "generate",
        str(golden_folder),
        "-p",
        "x",
        "--quiet",
        "--max-new-tokens",
        "1",
        "--top-p",
        "0.5",
    )
    assert (outcome.code, outcome.err) == (0, "")


def test_stats_go_to_stderr(run: Call, golden_folder: Path) -> None:
    outcome = run("generate", str(golden_folder), "-p", "x", "--max-new-tokens", "1", "--stats")
    assert all(name in outcome.err for name in STATS)
    assert not any(name in outcome.out for name in STATS)


def test_the_seed_of_a_draw_is_printed_and_repeats_it(run: Call, golden_folder: Path) -> None:
    arguments = ("generate", str(golden_folder), "-p", "x", "--temperature", "1", "--mode", "ar")
    first = run(*arguments, "--max-new-tokens", "9", "--seed", "7")
    assert "seed 7" in first.err
    assert run(*arguments, "--max-new-tokens", "9", "--seed", "7").out == first.out
    assert run(*arguments, "--max-new-tokens", "9", "--seed", "8").out != first.out


def test_a_trace_is_written_with_a_record_a_pass(answer: Call, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    result = answer("-p", "x", "--max-new-tokens", "5", "--trace", str(path))
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(records[0]["model_hash"]) == 64
    passes = [record for record in records if record["record"] == "pass"]
    assert len(passes) == result["stats"]["previews"]


def test_ctrl_c_keeps_what_was_committed_and_is_code_130(
    run: Call, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Generator.run

    def interrupted(self: Generator, prompt_ids: Sequence[int]) -> EventStream:
        with closing(whole(self, prompt_ids)) as events:
            for event in events:
                if getattr(event, "block", 0) == 1:
                    raise KeyboardInterrupt
                yield event

    monkeypatch.setattr(Generator, "run", interrupted)
    outcome = run("generate", str(golden_folder), "-p", "x", "--json", "--max-new-tokens", "90")
    assert outcome.code == 130
    result = json.loads(outcome.out)
    assert result["finish_reason"] == "cancelled"
    assert len(result["token_ids"]) == 32


def test_heat_colours_each_token_on_a_terminal_and_says_what_the_colours_are(
    run: Call, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("denoise", "ar", "draft"):
        model = str(golden_folder)
        arguments = ("generate", model, "-p", "hello", "--mode", mode, "--max-new-tokens", "33")
        plain = run(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr("clover_local.cli.console.has_colour", lambda stream: True)
            coloured = run(*arguments, "--heat")
            quiet = run(*arguments, "--heat", "--quiet")
        assert re.search("\x1b\\[3[1236]m", coloured.out)
        assert coloured.out == quiet.out
        assert printable(re.sub("\x1b\\[[0-9;]*m", "", coloured.out)) == printable(plain.out)
        assert "\x1b[32m from 99 %" in coloured.err and "\x1b[31m below" in coloured.err
        assert "confidence" not in quiet.err


def test_heat_without_colours_is_reported_and_changes_nothing(
    run: Call, golden_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", str(golden_folder), "-p", "hello", "--max-new-tokens", "5")
    plain = run(*arguments)
    outcome = run(*arguments, "--heat")
    assert (outcome.code, outcome.out) == (0, plain.out)
    assert "--heat has no effect where stdout shows no colours" in outcome.err
    monkeypatch.setattr("clover_local.cli.console.is_terminal", lambda stream: True)
    monkeypatch.setenv("NO_COLOR", "1")
    outcome = run(*arguments, "--heat")
    assert "--heat has no effect" in outcome.err and "\x1b[3" not in outcome.out
    outcome = run(*arguments, "--heat", "--json")
    assert (outcome.code, "--heat has no effect with --json" in outcome.err) == (0, True)
    assert run(*arguments, "--heat", "--strict").code == 1


def test_a_trace_never_takes_the_place_of_its_prompt(run: Call, tmp_path: Path) -> None:
    prompt = tmp_path / "run.jsonl"
    assert run("generate", "demo", "-p", "hi", "--trace", str(prompt), "-q").code == 0
    before = prompt.read_bytes()
    outcome = run("generate", "demo", "-f", str(prompt), "--trace", str(prompt))
    assert (outcome.code, outcome.out) == (1, "")
    assert "is the file of the prompt" in outcome.err
    assert run("generate", "demo", "-p", "hi", "--context", "1", "--trace", str(prompt)).code == 1
    assert prompt.read_bytes() == before
