"""Drawn tokens against the plain operator's, whatever is cut, ties included."""

import pytest
import torch
from torch import Tensor

from clover_local.decoding.draw import draw as plain_draw
from clover_local.decoding.random import PICK, uniform
from clover_local.kernels.gpu.sampling.controls import ControlTensors
from clover_local.kernels.gpu.sampling.draw import DrawTensors, draw, gate_cases
from clover_local.kernels.gpu.sampling.sample import SampleConfig, SampledRows, sample

SMALL = SampleConfig(block_v=64, num_warps=1)


def no_controls(rows: int, *, device: str) -> ControlTensors:
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    off = torch.zeros(rows, device=device)
    return ControlTensors(
        banned=ids,
        seen=ids,
        counts=torch.zeros(0, device=device),
        seen_count=torch.zeros(1, dtype=torch.int32, device=device),
        penalties=torch.tensor([0.0, 0.0, 1.0], device=device),
        stop_ids=ids,
        stop_bias=off,
        think_end_ids=ids,
        think_end_bias=off,
    )


def settings(
    positions: list[int],
    *,
    device: str,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    pass_number: int = 0,
) -> DrawTensors:
    signed = seed - (1 << 64) if seed >> 63 else seed
    return DrawTensors(
        temperature=torch.tensor([temperature], device=device),
        top_k=torch.tensor([top_k], dtype=torch.int32, device=device),
        top_p=torch.tensor([top_p], dtype=torch.float64, device=device),
        seed=torch.tensor([signed], device=device),
        pass_number=torch.tensor([pass_number], dtype=torch.int32, device=device),
        positions=torch.tensor(positions, device=device),
    )


def drawn(logits: Tensor, chosen: DrawTensors) -> SampledRows:
    """One token for each row of `logits`."""
    device = str(logits.device)
    rows = torch.arange(len(logits), device=device)
    controls = no_controls(len(logits), device=device)
    sampled, summary = sample(logits, controls, rows=rows, config=SMALL)
    draw(
        logits,
        controls,
        rows=rows,
        settings=chosen,
        sampled=sampled,
        summary=summary,
        config=SMALL,
    )
    return sampled


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 20, 0.95), (3.0, 0, 0.7), (1.3, 7, 1.0), (0.01, 0, 1.0)],
)
def test_draws_are_those_of_the_plain_operator(
    temperature: float, top_k: int, top_p: float, device: str
) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(3, 100) * 2).half().float()  # a few ties
    logits[1] = logits[1].round()  # nearly all are ties
    positions, seed = [1, 2, 900], (1 << 63) + 5
    uniforms = torch.tensor(
        [uniform(seed, n, pass_number=3, purpose=PICK) for n in positions], dtype=torch.float64
    )
    expected = plain_draw(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)
    chosen = settings(
        positions,
        device=device,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        pass_number=3,
    )
    got = drawn(logits.to(device), chosen)
    assert got.token.tolist() == expected.tolist()
    probabilities = logits.softmax(-1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(got.confidence.cpu(), probabilities, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.raw_confidence.cpu(), probabilities, atol=1e-6, rtol=1e-5)


def test_equal_tokens_are_drawn_alike(device: str) -> None:
    logits = torch.zeros(2, 130, device=device)
    positions = [3, 8]
    got = drawn(logits, settings(positions, device=device))
    wanted = [int(uniform(0, n, pass_number=0, purpose=PICK) * 130) for n in positions]
    assert got.token.tolist() == wanted


def test_nucleus_ends_within_equal_tokens(device: str) -> None:
    # Half of four equal tokens: the two of lowest id.
    logits = torch.full((4, 80), -200.0, device=device)
    logits[:, [70, 5, 40, 66]] = 1.0
    positions = [1, 2, 3, 4]
    got = drawn(logits, settings(positions, device=device, top_p=0.5))
    numbers = [uniform(0, n, pass_number=0, purpose=PICK) for n in positions]
    assert got.token.tolist() == [5 if number < 0.5 else 40 for number in numbers]


def test_row_of_nan_draws_some_token_and_no_confidence(device: str) -> None:
    got = drawn(torch.full((1, 70), torch.nan, device=device), settings([1], device=device))
    assert 0 <= int(got.token) < 70
    assert bool(got.confidence.isnan())


def test_wrong_settings_are_refused(device: str) -> None:
    logits = torch.zeros(2, 70, device=device)
    with pytest.raises(ValueError, match=r"positions is \[3\] torch\.int64, not \[2\]"):
        drawn(logits, settings([1, 2, 3], device=device))


def test_splits_have_to_be_those_of_the_sample(device: str) -> None:
    logits, rows = torch.zeros(1, 70, device=device), torch.zeros(1, dtype=torch.int64).to(device)
    controls = no_controls(1, device=device)
    sampled, summary = sample(logits, controls, rows=rows, config=SMALL)
    with pytest.raises(ValueError, match="2 splits of 70 columns by 4096"):
        draw(
            logits,
            controls,
            rows=rows,
            settings=settings([1], device=device),
            sampled=sampled,
            summary=summary,
        )


def test_the_gate_has_the_draw() -> None:
    assert [case.name for case in gate_cases()] == ["draw"]
