"""The three stages of the chunked delta rule against the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gated_delta_commit import gated_delta_recurrent as definition
from clover_local.kernels.gpu.delta import gated_delta_chunked as module
from clover_local.kernels.gpu.delta.gated_delta_chunked import gated_delta_chunked
from clover_local.kernels.norms import l2_norm

H_K, H_V, DK, DV = 1, 2, 40, 20


def inputs(rows: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    y = torch.cat([l2_norm(normal(rows, 2 * H_K, DK)).flatten(1), normal(rows, H_V * DV)], dim=1)
    q, k, v = torch.split(y, [H_K * DK, H_K * DK, H_V * DV], dim=1)
    return {
        "q": q.view(rows, H_K, DK),
        "k": k.view(rows, H_K, DK),
        "v": v.view(rows, H_V, DV),
        "g": -(normal(rows, H_V) * 2).exp(),
        "beta": normal(rows, H_V).sigmoid(),
        "state": normal(H_V, DK, DV),
    }


@pytest.mark.parametrize("rows", [1, 32, 33, 70])
def test_chunks_are_the_definition(rows: int, device: str) -> None:
    x = inputs(rows, device)
    before = x["state"].clone()
    torch.testing.assert_close(gated_delta_chunked(**x), definition(**x), rtol=1e-5, atol=1e-5)
    assert torch.equal(x["state"], before)


def test_spans_of_rows_hand_the_state_on_in_place(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPAN", 32)
    x = inputs(70, device)
    expected = definition(**x)
    out, after = gated_delta_chunked(**x, new_state=x["state"])
    assert after is x["state"]
    torch.testing.assert_close((out, after), expected, rtol=1e-5, atol=1e-5)


def test_stable_when_one_key_repeats(device: str) -> None:
    x = inputs(32, device)
    x["k"].copy_(x["k"][:1].clone().expand(32, -1, -1))
    x["g"].fill_(-1e-4)
    x["beta"].fill_(0.999)
    torch.testing.assert_close(gated_delta_chunked(**x), definition(**x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [-5000.0, -torch.inf])
def test_digits_are_kept_behind_a_row_that_forgets_everything(gate: float, device: str) -> None:
    x = inputs(40, device)
    x["g"].fill_(-1e-3)
    x["g"][7] = gate
    torch.testing.assert_close(gated_delta_chunked(**x), definition(**x), rtol=1e-5, atol=1e-5)


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    x = inputs(3, device)
    with pytest.raises(ValueError, match=r"beta is \[2, 2\], not \[3, 2\]"):
        gated_delta_chunked(**x | {"beta": x["beta"][:2]})
    large = torch.zeros(3, 1, 160, device=device)
    with pytest.raises(ValueError, match="160 rows in a head's state, at most 128"):
        gated_delta_chunked(
            **x | {"q": large, "k": large, "state": torch.zeros(2, 160, 20, device=device)}
        )
