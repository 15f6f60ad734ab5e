"""The memory flags of `generate` and `chat`: what they do, and what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


@pytest.fixture
def answer(run: Call, golden_folder: Path) -> Call:
    """Runs `generate` on the golden checkpoint."""

    def answer(*arguments: str) -> Any:
        return run(
            "generate", str(golden_folder), "-p", "hello", "--max-new-tokens", "9", *arguments
        )

    return answer


def test_few_slots_give_the_same_text_and_say_what_they_cost(answer: Call) -> None:
    whole = answer("--json")
    some = answer("--json", "--stats", "--expert-slots", "5", "--policy", "lru")
    assert some.code == 0, some.err
    ours, theirs = json.loads(some.out), json.loads(whole.out)
    assert ours["token_ids"] == theirs["token_ids"]
    assert theirs["stats"]["hit_rate"] == 1
    assert 0 <= ours["stats"]["hit_rate"] < 1
    assert ours["stats"]["bytes_from_host"] > 0
    assert "experts: 5 of 32 fit on the device (16 %)" in some.err
    assert "policy lru" in some.err
    for row in ("expert hits", "expert misses", "not kept", "evicted", "waited for copies"):
        assert row in some.err


def test_a_limit_in_bytes_decides_the_slots(answer: Call) -> None:
    done = answer("--gpu-memory", "4900kB", "--context", "600")
    assert done.code == 0, done.err
    assert "of 32 fit on the device" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu-memory", "1MB"), "does not fit into 1.00 MB"),
        (("--gpu-memory", "lots"), "--gpu-memory"),
        (("--expert-slots", "3"), "4 (one a layer) to 32 (all)"),
        (("--policy", "mru", "--expert-slots", "9"), "use one of lfru"),
        (("--policy", "static", "--expert-slots", "9"), "--expert-profile FILE"),
        (("--expert-profile", "none.json", "--expert-slots", "9"), "none.json cannot be read"),
        (("--cpu-experts", "on"), "always copied to the device"),
        (("--policy", "lru", "--strict"), "has no effect while every expert is on the device"),
        (("--pin-limit", "1GB", "--expert-slots", "9", "--strict"), "pins no memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_one_line_and_no_answer(
    answer: Call, arguments: tuple[str, ...], says: str
) -> None:
    done = answer(*arguments)
    assert done.code == 1
    assert done.out == ""
    assert says in done.err
    assert "Traceback" not in done.err


def test_flags_without_effect_are_noted(answer: Call) -> None:
    done = answer("--policy", "lru", "--pin-limit", "1GB")
    assert done.code == 0
    assert "--policy has no effect while every expert is on the device" in done.err
    assert "--pin-limit has no effect on a CPU" in done.err
