"""The stable JSON of a result, and which ids make up its text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from clover_local.decoding.result import host_peak_bytes
from clover_local.generate import generate

if TYPE_CHECKING:
    from tests.decoding.conftest import Scripted

STOP = 48


def test_json_is_the_stable_object(scripted: Scripted) -> None:
    model = scripted.model(answer=lambda p: STOP if p == 3 else 5)
    result = generate(model, scripted.state(), scripted.settings(), [1])
    made: dict[str, Any] = result.to_json(text="so")
    assert list(made) == [
        *("text", "token_ids", "prompt_tokens", "finish_reason", "mode", "blocks", "rounds"),
        *("confidence", "stats"),
    ]
    assert (made["text"], made["token_ids"], made["prompt_tokens"]) == ("so", [5, 5, STOP], 1)
    (block,) = made["blocks"]
    assert list(block) == ["start", "tokens", "passes", "fixed"]
    assert (block["start"], block["tokens"], block["passes"]) == (1, [5, 5, STOP], 1)
    assert len(block["fixed"][0]) == 32
    assert block["fixed"][0][2][:2] == [2, STOP]
    assert block["fixed"][0][2][2] == pytest.approx(0.99, abs=1e-5)
    assert made["confidence"] == pytest.approx([0.99] * 3, abs=1e-5)
    assert list(made["stats"]) == [
        *("forwards", "previews", "commits", "tokens_per_forward", "tokens_per_preview"),
        *("ms_per_preview", "ms_per_commit", "prompt_tokens_per_second", "tokens_per_second"),
        *("distinct_experts_per_layer", "hit_rate", "bytes_from_host", "device_peak_bytes"),
        "host_peak_bytes",
    ]


def test_stop_token_is_among_the_ids_and_not_in_the_text(scripted: Scripted) -> None:
    stopped = generate(
        scripted.model(answer=lambda p: STOP if p == 3 else 5),
        scripted.state(),
        scripted.settings(),
        [1],
    )
    assert (stopped.token_ids, stopped.text_ids) == ((5, 5, STOP), (5, 5))
    cut = generate(scripted.model(), scripted.state(), scripted.settings(max_new_tokens=2), [1])
    assert cut.token_ids == cut.text_ids == (1, 2)


def test_host_peak_is_counted_in_bytes() -> None:
    peak = host_peak_bytes()
    assert peak is None or peak > 30 * 2**20  # torch alone is more
