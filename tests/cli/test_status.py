"""A run's cost in words."""

from dataclasses import replace

import pytest

from clover_local.cli.status import advice_line, size, stats_rows, status_line
from clover_local.decoding.auto.chooser import Rate
from clover_local.decoding.result import (
    Block,
    EmittedToken,
    Fixed,
    GenerationResult,
    RoundStats,
    Stats,
)

STATS = Stats(
    forwards=10,
    previews=8,
    commits=2,
    tokens_per_forward=3.2,
    tokens_per_preview=4.0,
    ms_per_preview=12.34,
    ms_per_commit=None,
    prompt_tokens_per_second=None,
    tokens_per_second=123.4,
    distinct_experts_per_layer=5.5,
    hit_rate=1.0,
    bytes_from_host=0,
    device_peak_bytes=None,
    host_peak_bytes=2_500_000_000,
)


def result(finish_reason: str, *, blocks: int = 2) -> GenerationResult:
    token = EmittedToken(1, 0.5, 0, 0, "denoise")
    passes = ((Fixed(0, 1, 0.5),),) * 4
    block = Block(0, (1,), passes)
    return GenerationResult((token,) * 32, 5, 0, finish_reason, "denoise", (block,) * blocks, STATS)


def test_the_line_has_speed_passes_and_memory() -> None:
    line = status_line(result("stop"))
    for part in ("32 tokens", "123 tok/s", "3.2 a forward", "4.0 passes a block", "12.3 ms a pass"):
        assert part in line
    assert line.endswith("2.5 GB at most")


@pytest.mark.parametrize(
    ("reason", "words"),
    [("length", "max_new_tokens"), ("context", "/new"), ("cancelled", "stopped")],
)
def test_the_line_says_why_an_answer_ended_early(reason: str, words: str) -> None:
    assert words in status_line(result(reason))


def test_the_advice_names_the_mode_its_speed_and_what_to_type() -> None:
    line = advice_line(Rate("draft", tokens_per_forward=5.0, ms_per_forward=5.9))
    assert line.startswith("draft would make about 847 tok/s")
    assert "/mode auto" in line


def test_modes_without_blocks_have_no_passes() -> None:
    assert "passes" not in status_line(result("stop", blocks=0))


def test_rows_show_units_and_what_was_not_measured() -> None:
    rows = dict(stats_rows(result("stop")))
    assert rows["ms_per_preview"] == "12.34 ms"
    assert rows["ms_per_commit"] == "-"
    assert rows["host_peak_bytes"] == "2.5 GB"
    assert rows["forwards"] == "10"


def test_rounds_are_told_where_there_were_some() -> None:
    rounds = RoundStats(rounds=4, tokens_per_round=5.25, drafts_per_round=15.0, ms_per_verify=2.5)
    drafted = replace(result("stop", blocks=0), of_rounds=rounds)
    assert "5.2 a round" in status_line(drafted)
    assert dict(stats_rows(drafted))["ms_per_verify"] == "2.50 ms"
    assert "ms_per_verify" not in dict(stats_rows(result("stop")))


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (62_914_560, "63 MB")]
)
def test_sizes(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown
