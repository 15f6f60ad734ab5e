"""Accepted rows and the packed report against the `threshold` rule, on hand-made tables."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.decoding.pick import RowStatistics
from clover_local.decoding.rules.threshold import threshold
from clover_local.kernels.gpu.sampling.accept import (
    ABOVE,
    CONFIDENCE,
    ENTROPY,
    MASKED_LEFT,
    MOST_CONFIDENT,
    RAW_CONFIDENCE,
    REASON,
    STAYS,
    TOKEN,
    TOP_IDS,
    TOP_PROBABILITIES,
    WORDS,
    accept,
    gate_cases,
    report_rows,
)
from clover_local.kernels.gpu.sampling.sample import TOP, SampledRows

MASK, THINK_END = 99, 40


def sampled(confidence: list[float], *, device: str, top: int = TOP) -> SampledRows:
    """Row r picks token 30 + r; its other numbers are any."""
    rows = len(confidence)
    numbers = torch.rand(rows, top + 2, generator=torch.Generator().manual_seed(rows)).to(device)
    return SampledRows(
        token=torch.arange(rows, device=device) + 30,
        confidence=torch.tensor(confidence, device=device),
        raw_confidence=numbers[:, 0].contiguous(),
        entropy=numbers[:, 1].contiguous(),
        top_ids=torch.arange(rows * top, device=device).view(rows, top),
        top_probabilities=numbers[:, 2:].contiguous(),
    )


class Pass:
    """One launch, and what it left on the device."""

    def __init__(
        self, confidence: list[float], block: list[int], *, device: str, limit: float = 0.95
    ) -> None:
        self.rows = sampled(confidence, device=device)
        self.block = torch.tensor(block, device=device)
        self.bias = torch.ones(len(block), device=device)
        self.number = torch.tensor([7], dtype=torch.int32, device=device)
        self.report = torch.full((len(block), WORDS), -7, dtype=torch.int32, device=device)
        accept(
            self.rows,
            block=self.block,
            mask_token_id=MASK,
            threshold=torch.tensor([limit], device=device),
            think_end_ids=torch.tensor([THINK_END], device=device),
            think_end_bias=self.bias,
            pass_number=self.number,
            report=self.report,
        )


def by_the_rule(
    confidence: list[float], block: list[int], limit: float
) -> tuple[list[int], list[int]]:
    """The block after the pass, and the reasons, by the plain operator."""
    masked = [row for row, token in enumerate(block) if token == MASK]
    unread = torch.zeros(len(masked))
    table = RowStatistics(
        token=torch.tensor(masked) + 30,
        confidence=torch.tensor([confidence[row] for row in masked]),
        raw_confidence=unread,
        entropy=unread,
        top_ids=unread[:, None].long(),
        top_probabilities=unread[:, None],
    )
    after, reasons = list(block), [STAYS] * len(block)
    accepted = threshold(table, threshold=limit)
    for row, taken, reason in zip(masked, accepted.accept.tolist(), accepted.reasons, strict=True):
        if taken:
            after[row] = 30 + row
            reasons[row] = ABOVE if reason == "above_threshold" else MOST_CONFIDENT
    return after, reasons


CASES: dict[str, tuple[list[float], list[int], float]] = {
    "some-sure": ([0.5, 0.96, 0.2, 0.99, 0.1], [MASK] * 5, 0.95),
    "all-sure": ([0.97, 0.96, 0.99], [MASK] * 3, 0.95),
    "none-sure": ([0.3, 0.1, 0.6, 0.5, 0.2, 0.1], [MASK] * 6, 0.95),
    "tie": ([0.1, 0.4, 0.2, 0.4, 0.4, 0.1, 0.3], [MASK] * 7, 0.4),
    "equal-is-not-above": ([0.7, 0.35], [MASK] * 2, 0.7),
    "one-row": ([0.0], [MASK], 1.0),
    "one-masked-row": ([0.9, 0.01, 0.99], [5, MASK, 6], 0.95),
    "surer-rows-are-fixed": ([0.99, 0.2, 0.3, 0.99], [5, MASK, MASK, 8], 0.95),
    "threshold-zero": ([0.01, 0.3, 0.0], [MASK] * 3, 0.0),
    "whole-block": ([(i * 7 % 32) / 32 for i in range(32)], [MASK, 3] * 16, 0.6),
    "more-than-a-block": ([(i * 5 % 33) / 33 for i in range(33)], [MASK] * 33, 0.9),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_accepted_as_by_the_rule(case: str, device: str) -> None:
    confidence, block, limit = CASES[case]
    after, reasons = by_the_rule(confidence, block, limit)
    done = Pass(confidence, block, device=device, limit=limit)
    assert done.block.tolist() == after
    assert done.report[:, REASON].tolist() == reasons
    assert set(done.report[:, MASKED_LEFT].tolist()) == {after.count(MASK)}
    assert done.number.tolist() == [8]


def test_report_has_every_rows_numbers(device: str) -> None:
    done = Pass([0.5, 0.96, 0.2], [MASK, MASK, 5], device=device)
    check_report(done.report, done.rows)


@pytest.mark.parametrize("top", [2, TOP])
def test_report_without_a_rule(top: int, device: str) -> None:
    rows = sampled([0.25, torch.nan, 0.5], device=device, top=top)
    report = torch.full((3, WORDS), -7, dtype=torch.int32, device=device)
    report_rows(rows, report=report)
    check_report(report, rows)
    assert report[:, [REASON, MASKED_LEFT]].tolist() == [[0, 0]] * 3


def check_report(report: Tensor, rows: SampledRows) -> None:
    floats, top = report.view(torch.float32), rows.top_ids.shape[1]
    assert torch.equal(report[:, TOKEN].long(), rows.token)
    assert torch.equal(report[:, TOP_IDS : TOP_IDS + top].long(), rows.top_ids)
    expected = {CONFIDENCE: "confidence", RAW_CONFIDENCE: "raw_confidence", ENTROPY: "entropy"}
    for word, name in expected.items():
        torch.testing.assert_close(
            floats[:, word], getattr(rows, name), atol=0, rtol=0, equal_nan=True
        )
    probabilities = floats[:, TOP_PROBABILITIES : TOP_PROBABILITIES + top]
    assert torch.equal(probabilities, rows.top_probabilities)


def test_bias_ends_with_the_thinking(device: str) -> None:
    confidence = [0.1] * 12
    assert Pass(confidence, [MASK] * 12, device=device).bias.tolist() == [1.0] * 12
    confidence[THINK_END - 30] = 0.5  # the row that picks that token, alone and not above
    assert Pass(confidence, [MASK] * 12, device=device).bias.tolist() == [0.0] * 12


def test_bias_stays_where_the_end_of_thinking_is_not_accepted(device: str) -> None:
    block = [MASK] * 12
    block[THINK_END - 30] = 5
    assert Pass([0.1] * 11 + [0.2], block, device=device).bias.tolist() == [1.0] * 12


@pytest.mark.parametrize("others", [0.1, 0.99], ids=["unsure", "sure"])
def test_row_of_nan_leaves_the_block_as_it_was(others: float, device: str) -> None:
    done = Pass([others, torch.nan, others], [MASK, MASK, MASK], device=device)
    assert done.block.tolist() == [MASK] * 3
    assert done.report[:, REASON].tolist() == [STAYS] * 3
    assert done.number.tolist() == [7]
    assert bool(done.report.view(torch.float32)[1, CONFIDENCE].isnan())


def test_nan_of_a_fixed_row_does_no_harm(device: str) -> None:
    done = Pass([0.2, torch.nan, 0.1], [MASK, 5, MASK], device=device)
    assert done.block.tolist() == [30, 5, MASK]


def test_all_rows_of_nan_end_too(device: str) -> None:
    assert Pass([torch.nan] * 3, [MASK] * 3, device=device).block.tolist() == [MASK] * 3


def test_model_without_an_end_of_thinking(device: str) -> None:
    rows = sampled([0.5, 0.99], device=device)
    block, bias = torch.tensor([MASK, MASK], device=device), torch.zeros(2, device=device)
    accept(
        rows,
        block=block,
        mask_token_id=MASK,
        threshold=torch.tensor([0.9], device=device),
        think_end_ids=torch.zeros(0, dtype=torch.int64, device=device),
        think_end_bias=bias,
        pass_number=torch.zeros(1, dtype=torch.int32, device=device),
        report=torch.zeros(2, WORDS, dtype=torch.int32, device=device),
    )
    assert block.tolist() == [MASK, 31]


def test_wrong_tensors_are_refused() -> None:
    rows = sampled([0.5, 0.9], device="cpu")
    with pytest.raises(ValueError, match=r"report is \[3, 16\], not \[2, 16\]"):
        report_rows(rows, report=torch.zeros(3, WORDS, dtype=torch.int32))
    report = torch.zeros(2, WORDS, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"token is torch\.int32, not torch\.int64"):
        report_rows(replace(rows, token=rows.token.int()), report=report)


def test_the_gate_has_both() -> None:
    assert [case.name for case in gate_cases()] == ["accept", "report"]
