"""One launch gives what the plain operator does, wherever the embedding lies."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.kernels import residual as plain
from clover_local.kernels.gpu.start import start_pass
from clover_local.kernels.norms import rotary_angles

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY, CONTEXT = 13, 50


def arguments(
    device: str, *, columns: int = 72, half: int = 5, length: int = 4, seed: int = 1
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    cos, sin = rotary_angles(torch.arange(CONTEXT), theta=1e4, rotary_dim=2 * half)
    return {
        "embedding": torch.randn(VOCABULARY, columns, generator=generator).to(device),
        "norm": (torch.randn(columns, generator=generator) * 0.1).to(device),
        "eps": 1e-6,
        "length": torch.tensor([length], dtype=torch.int32, device=device),
        "cos": cos.to(device),
        "sin": sin.to(device),
    }


def random_ids(rows: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(VOCABULARY, (rows,), generator=generator).to(device)


def check_same(got: plain.Started, expected: plain.Started) -> None:
    assert got.hidden_states.dtype == expected.hidden_states.dtype
    assert torch.equal(got.hidden_states, expected.hidden_states)
    torch.testing.assert_close(got.normed, expected.normed)
    assert torch.equal(got.cos, expected.cos)
    assert torch.equal(got.sin, expected.sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "half"), [(1, 1, 1), (7, 72, 5), (33, 40, 4), (2, 2048, 32), (2, 3001, 3)]
)
def test_rows_and_angles_are_those_of_the_plain_operator(
    rows: int, columns: int, half: int, dtype: torch.dtype, device: str
) -> None:
    given = arguments(device, columns=columns, half=half)
    given["embedding"] = given["embedding"].to(dtype)
    ids = random_ids(rows, device)
    check_same(start_pass(ids, **given), plain.start_pass(ids, **given))


@pytest.mark.parametrize("length", [0, CONTEXT - 7, CONTEXT - 2, CONTEXT + 9])
def test_rows_behind_the_tables_have_their_last_row(length: int, device: str) -> None:
    given, ids = arguments(device, length=length), random_ids(7, device)
    check_same(start_pass(ids, **given), plain.start_pass(ids, **given))


def test_length_is_read_when_the_kernel_runs(device: str) -> None:
    given, ids = arguments(device), random_ids(3, device)
    start_pass(ids, **given)
    given["length"].fill_(21)
    check_same(start_pass(ids, **given), plain.start_pass(ids, **given))


def test_an_id_outside_the_embedding_makes_a_row_of_nan(device: str) -> None:
    ids = torch.tensor([3, VOCABULARY, -1, 1 << 40], device=device)
    started = start_pass(ids, **arguments(device))
    for rows in (started.hidden_states, started.normed):
        assert rows[0].isfinite().all()
        assert rows[1:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_embedding_may_lie_in_pinned_host_memory() -> None:
    given, ids = arguments("cuda"), random_ids(7, "cuda")
    host = given["embedding"].cpu()
    check_same(
        start_pass(ids, **{**given, "embedding": host.pin_memory()}),
        plain.start_pass(ids, **given),
    )
    with pytest.raises(ValueError, match="the embedding is on cpu, not pinned; ids on cuda"):
        start_pass(ids, **{**given, "embedding": host})


@pytest.mark.parametrize(
    ("ids", "changed", "message"),
    [
        (torch.zeros(2, 1).long(), {}, r"ids are \[2, 1\], not \[T\]"),
        (torch.zeros(2).int(), {}, "ids is torch.int32, not torch.int64"),
        (torch.zeros(2).long(), {"embedding": torch.zeros(4)}, r"the embedding is \[4\]"),
        (torch.zeros(2).long(), {"embedding": torch.zeros(4, 6).T}, r"strides \(1, 6\)"),
        (torch.zeros(2).long(), {"embedding": torch.zeros(4, 6).long()}, "is torch.int64"),
        (torch.zeros(2).long(), {"embedding": torch.zeros(1, 4097)}, "4097 columns, from 1 to"),
        (torch.zeros(2).long(), {"norm": torch.zeros(71)}, r"norm is \[71\], not \[72\]"),
        (torch.zeros(2).long(), {"length": torch.zeros(1).long()}, "length is torch.int64"),
        (torch.zeros(2).long(), {"length": torch.zeros(2).int()}, r"length is \[2\], not \[1\]"),
        (torch.zeros(2).long(), {"cos": torch.zeros(8)}, r"cos is \[8\], not \[N, R / 2\]"),
        (torch.zeros(2).long(), {"sin": torch.zeros(50, 4)}, r"sin is \[50, 4\], not \[50, 5\]"),
    ],
)
def test_wrong_calls_are_refused(ids: Tensor, changed: Mapping[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_pass(ids, **{**arguments("cpu"), **changed})
