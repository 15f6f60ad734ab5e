"""Tokens and row statistics against `pick`, with every control, odd vocabularies and ties."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from clover_local.decoding.controls import Controls
from clover_local.decoding.pick import RowStatistics, pick
from clover_local.decoding.settings import Settings
from clover_local.kernels.gpu.sampling.controls import ControlTensors
from clover_local.kernels.gpu.sampling.sample import (
    SampleConfig,
    SampledRows,
    gate_cases,
    sample,
)

SMALL = SampleConfig(block_v=64, num_warps=1)
SETTINGS = Settings(mask_token_id=0, vocab_size=1000)


def controls_off(rows: int) -> Controls:
    none = torch.zeros(0, dtype=torch.int64)
    return Controls(
        banned=none,
        seen=none,
        counts=torch.zeros(0),
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        stop_ids=none,
        stop_bias=None,
        think_end_token_id=None,
        think_end_bias=None,
    )


def controls_on(rows: int) -> Controls:
    """Every control, on ids that meet: 5 is banned and seen, 7 seen and a stop, 9 all but that."""
    return Controls(
        banned=torch.tensor([0, 5, 90]),
        seen=torch.tensor([5, 7, 9, 33, 96]),
        counts=torch.tensor([1.0, 2.0, 1.0, 11.0, 3.0]),
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        stop_ids=torch.tensor([7, 9]),
        stop_bias=torch.linspace(0, 4, rows),
        think_end_token_id=9,
        think_end_bias=torch.linspace(3, 0, rows),
    )


def on_device(controls: Controls, *, rows: int, device: str, room: int = 0) -> ControlTensors:
    """The same controls as a kernel takes them; `room` more places in the list of seen tokens."""
    end = controls.think_end_token_id
    off = torch.zeros(rows)
    tensors = ControlTensors(
        banned=controls.banned,
        seen=torch.cat([controls.seen, torch.full((room,), 3)]),
        counts=torch.cat([controls.counts, torch.full((room,), 50.0)]),
        seen_count=torch.tensor([len(controls.seen)], dtype=torch.int32),
        penalties=torch.tensor(
            [controls.presence_penalty, controls.frequency_penalty, controls.repetition_penalty]
        ),
        stop_ids=controls.stop_ids,
        stop_bias=off if controls.stop_bias is None else controls.stop_bias,
        think_end_ids=torch.tensor([] if end is None else [end], dtype=torch.int64),
        think_end_bias=off if controls.think_end_bias is None else controls.think_end_bias,
    )
    return ControlTensors(**{name: x.to(device) for name, x in vars(tensors).items()})


def random_logits(rows: int, vocabulary: int, *, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).to(device)


def check_equal(got: SampledRows, expected: RowStatistics) -> None:
    assert got.token.tolist() == expected.token.tolist()
    for name in ("confidence", "raw_confidence", "entropy", "top_probabilities"):
        x, y = getattr(got, name).cpu(), getattr(expected, name)
        torch.testing.assert_close(x, y, atol=1e-6, rtol=2e-5)
    there = expected.top_probabilities > 0
    assert got.top_ids.cpu()[there].tolist() == expected.top_ids[there].tolist()


@pytest.mark.parametrize("make", [controls_off, controls_on], ids=["off", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [97, 200])
def test_rows_are_picked_as_by_the_plain_operator(
    vocabulary: int, dtype: torch.dtype, make: Callable[[int], Controls], device: str
) -> None:
    logits = random_logits(5, vocabulary).to(dtype)
    logits += torch.arange(vocabulary) * 1e-3  # a coarse dtype would have ties among its five best
    before = logits.clone()
    rows = [4, 0, 2]
    controls = make(len(rows))
    expected = pick(logits, controls, SETTINGS, rows=rows, positions=[1, 2, 3], pass_number=0)
    got, _ = sample(
        logits.to(device),
        on_device(controls, rows=len(rows), device=device, room=2),
        rows=torch.tensor(rows, device=device),
        config=SMALL,
    )
    assert torch.equal(got.token.cpu(), expected.token)
    if dtype == torch.float32:
        check_equal(got, expected)
    else:
        same = replace(expected, top_ids=got.top_ids.cpu())  # of equals the plain one takes any
        check_equal(got, same)
    assert torch.equal(logits, before)


def test_lower_id_wins_a_tie_within_and_across_splits(device: str) -> None:
    logits = torch.zeros(1, 150, device=device)
    logits[0, [140, 70, 71, 3, 100, 20]] = 2.0
    controls = on_device(controls_off(1), rows=1, device=device)
    got, _ = sample(
        logits, controls, rows=torch.zeros(1, dtype=torch.int64, device=device), config=SMALL
    )
    assert got.token.tolist() == [3]
    assert got.top_ids.tolist() == [[3, 20, 70, 71, 100]]


def test_vocabulary_smaller_than_the_top(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], device=device)
    controls = on_device(controls_off(1), rows=1, device=device)
    got, _ = sample(logits, controls, rows=torch.zeros(1, dtype=torch.int64, device=device))
    assert got.top_ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_broken_rows_have_no_confidence_and_hurt_no_other(broken: float, device: str) -> None:
    logits = random_logits(2, 100)
    if broken < 0:
        logits[1] = broken
    else:
        logits[1, 77] = broken
    controls = on_device(controls_on(2), rows=2, device=device)
    got, _ = sample(
        logits.to(device), controls, rows=torch.tensor([1, 0], device=device), config=SMALL
    )
    assert got.confidence.isnan().tolist() == [True, False]
    assert ((got.token >= 0) & (got.token < 100)).all()


def test_ids_outside_the_vocabulary_are_left_out(device: str) -> None:
    controls = replace(controls_off(1), banned=torch.tensor([-1, 100, 1 << 40]))
    logits = random_logits(1, 100, device=device)
    got, _ = sample(
        logits,
        on_device(controls, rows=1, device=device),
        rows=torch.zeros(1, dtype=torch.int64, device=device),
    )
    assert got.token.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"penalties": torch.zeros(2)}, "penalties has 2 numbers, not 3"),
        ({"stop_bias": torch.zeros(3)}, "stop_bias has 3 numbers, not 1"),
        ({"banned": torch.zeros(1)}, "banned is [1] torch.float32"),
        ({"counts": torch.zeros(4)}, "counts has 4 numbers, not 0"),
    ],
)
def test_wrong_controls_are_refused(change: dict[str, Tensor], message: str) -> None:
    controls = replace(on_device(controls_off(1), rows=1, device="cpu"), **change)
    with pytest.raises(ValueError) as caught:
        sample(torch.zeros(1, 9), controls, rows=torch.zeros(1, dtype=torch.int64))
    assert message in str(caught.value)


def test_wrong_logits_are_refused() -> None:
    controls = on_device(controls_off(1), rows=1, device="cpu")
    row = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="last stride of 9"):
        sample(torch.zeros(9, 9).T, controls, rows=row)
    with pytest.raises(ValueError, match=r"torch\.int64, not one of"):
        sample(torch.zeros(1, 9).long(), controls, rows=row)
    with pytest.raises(ValueError, match="at least one"):
        sample(torch.zeros(1, 9), controls, rows=row[:0])


def test_the_gate_has_the_real_vocabulary() -> None:
    assert [case.name for case in gate_cases()] == ["sample: split", "sample: join"]
