"""Probabilities of given tokens, row by row, against the definition."""

from collections.abc import Callable

import pytest
import torch

from clover_local.decoding.controls import Controls
from clover_local.decoding.pick import ControlledRows
from clover_local.kernels.gpu.sampling import accept
from clover_local.kernels.gpu.sampling.drafts import PROBABILITY, RAW_PROBABILITY, report_drafts
from clover_local.kernels.gpu.sampling.sample import sample
from tests.kernels.gpu.sampling.test_sample import controls_off, controls_on, on_device

ROWS, VOCABULARY = 5, 131
DRAFTS = [9, 5, 7, 130, -1]
"""One under every control, one banned, a stop, the last one, and none."""


@pytest.mark.parametrize("make", [controls_off, controls_on], ids=["off", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probabilities_are_those_of_the_controlled_rows(
    make: Callable[[int], Controls], dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = (torch.randn(ROWS + 2, VOCABULARY + 3, generator=generator) * 2).to(device, dtype)
    logits, rows = wide[:, :VOCABULARY], torch.arange(1, ROWS + 1, device=device)
    controls = make(ROWS)
    tensors = on_device(controls, rows=ROWS, device=device)
    sampled, summary = sample(logits, tensors, rows=rows)
    report = torch.zeros(ROWS, accept.WORDS, dtype=torch.int32, device=device)
    accept.report_rows(sampled, report=report)
    before, drafts = report.clone(), torch.tensor(DRAFTS, device=device)
    report_drafts(logits, tensors, rows=rows, drafts=drafts, summary=summary, report=report)
    floats = report.cpu().view(torch.float32)
    known = ControlledRows.of(logits[rows].cpu().float().clone(), controls, range(ROWS))
    for word, probabilities in (
        (PROBABILITY, known.probabilities),
        (RAW_PROBABILITY, known.probabilities if known.raw is None else known.raw),
    ):
        expected = [
            0.0 if draft < 0 else float(probabilities[row, draft])
            for row, draft in enumerate(DRAFTS)
        ]
        assert floats[:, word].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert torch.equal(report[:, :PROBABILITY], before[:, :PROBABILITY])


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    logits, rows = torch.zeros(2, 9, device=device), torch.arange(2, device=device)
    controls = on_device(controls_off(2), rows=2, device=device)
    _, summary = sample(logits, controls, rows=rows)
    report = torch.zeros(2, accept.WORDS, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"drafts is \[3\], not \[2\]"):
        report_drafts(
            logits,
            controls,
            rows=rows,
            drafts=torch.zeros(3, dtype=torch.int64, device=device),
            summary=summary,
            report=report,
        )
