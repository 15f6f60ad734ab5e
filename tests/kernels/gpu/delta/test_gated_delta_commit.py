"""The recurrent kernel of the delta rule against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gated_delta_commit import gated_delta_recurrent as definition
from clover_local.kernels.gpu.delta.gated_delta_commit import (
    RecurrentConfig,
    gated_delta_outputs,
    gated_delta_recurrent,
    gated_delta_replay,
)
from clover_local.kernels.norms import l2_norm

H_K, H_V, DK, DV = 2, 4, 20, 12


def inputs(rows: int, device: str) -> dict[str, Any]:
    """Rows of q, k and v lie in one tensor, as the convolution leaves them."""
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


def count(rows: int, device: str) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=device)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33])
def test_kernel_is_the_definition(rows: int, device: str) -> None:
    x = inputs(rows, device)
    before = x["state"].clone()
    torch.testing.assert_close(gated_delta_recurrent(**x), definition(**x), rtol=1e-5, atol=1e-5)
    assert torch.equal(x["state"], before)


@pytest.mark.parametrize(
    "config",
    [RecurrentConfig(block_values=4, num_warps=1), RecurrentConfig(block_values=16, num_warps=4)],
    ids=lambda c: f"{c.block_values}-columns",
)
def test_every_configuration_computes_the_same(config: RecurrentConfig, device: str) -> None:
    x = inputs(33, device)
    out = gated_delta_recurrent(**x, config=config)
    torch.testing.assert_close(out, definition(**x), rtol=1e-5, atol=1e-5)


def test_ends_of_gate_and_beta(device: str) -> None:
    x = inputs(9, device)
    x["g"][::3], x["g"][1::3] = -torch.inf, 0.0
    x["beta"][::2], x["beta"][1::4] = 1.0, 0.0
    torch.testing.assert_close(gated_delta_recurrent(**x), definition(**x), rtol=1e-5, atol=1e-5)


def test_pieces_equal_one_piece_bit_for_bit_in_place(device: str) -> None:
    x = inputs(9, device)
    whole, end = gated_delta_recurrent(**x)
    state, outputs = x.pop("state").clone(), []
    for piece in (slice(0, 1), slice(1, 4), slice(4, 9)):
        rows = {name: value[piece] for name, value in x.items()}
        out, after = gated_delta_recurrent(**rows, state=state, new_state=state)
        assert after is state
        outputs.append(out)
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("counted", [0, 1, 6])
def test_rows_that_do_not_count_leave_the_state_and_give_zeros(counted: int, device: str) -> None:
    x = inputs(6, device)
    out, after = gated_delta_recurrent(**x, counted=count(counted, device))
    assert torch.equal(out[counted:], torch.zeros_like(out[counted:]))
    if counted == 0:
        assert torch.equal(after, x["state"])
        return
    rows = {name: value[:counted] for name, value in x.items() if name != "state"}
    expected = gated_delta_recurrent(**rows, state=x["state"])
    assert torch.equal(out[:counted], expected[0])
    assert torch.equal(after, expected[1])


def test_outputs_alone_are_those_of_rows_that_count(device: str) -> None:
    x = inputs(6, device)
    before = x["state"].clone()
    assert torch.equal(gated_delta_outputs(**x), gated_delta_recurrent(**x)[0])
    assert torch.equal(x["state"], before)


def layered(layers: int, rows: int, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Inputs of a replay of several layers, behind whose rows others lie; and of each layer."""
    each = [inputs(rows + layer, device) for layer in range(layers)]
    together: dict[str, Any] = {"state": torch.stack([x["state"] for x in each])}
    for name in ("k", "v", "g", "beta"):
        room = torch.full((layers, rows + layers, *each[0][name].shape[1:]), torch.nan)
        together[name] = room.to(device)[:, :rows]
        for layer, x in enumerate(each):
            together[name][layer] = x[name][:rows]
            x[name] = x[name][:rows]
        for x in each:
            x["q"] = x["q"][:rows]
    return together, each


@pytest.mark.parametrize("rows", [1, 5])
def test_a_replay_of_all_layers_makes_the_state_of_each(rows: int, device: str) -> None:
    together, each = layered(3, rows, device)
    before = together["state"].clone()
    after = torch.empty_like(before)
    gated_delta_replay(**together, new_state=after)
    for layer, x in enumerate(each):
        assert torch.equal(after[layer], gated_delta_recurrent(**x)[1])
    assert torch.equal(together["state"], before)


def test_a_replay_of_no_layers_does_nothing(device: str) -> None:
    together, _ = layered(2, 3, device)
    none = {name: x[:0] for name, x in together.items()}
    gated_delta_replay(**none, new_state=none["state"])


def test_layers_that_do_not_fit_are_refused_with_both_numbers(device: str) -> None:
    together, _ = layered(2, 3, device)
    state = together["state"]
    with pytest.raises(ValueError, match="v is of 1 layers, the state of 2"):
        gated_delta_replay(**together | {"v": together["v"][:1]}, new_state=state)
    with pytest.raises(ValueError, match=r"layers of g are 12 apart, those of beta 20"):
        gated_delta_replay(**together | {"g": together["g"].contiguous()}, new_state=state)
    with pytest.raises(ValueError, match=r"new state is \[2, 4, 20, 11\], not \[2, 4, 20, 12\]"):
        gated_delta_replay(**together, new_state=state[..., 1:])


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    x = inputs(3, device)
    with pytest.raises(ValueError, match=r"g is \[2, 4\], not \[3, 4\]"):
        gated_delta_recurrent(**x | {"g": x["g"][:2]})
    with pytest.raises(ValueError, match=r"q is torch.float16, not torch.float32"):
        gated_delta_recurrent(**x | {"q": x["q"].half()})
    with pytest.raises(ValueError, match=r"v is \[1, 4, 11\], not \[1, 4, 12\]"):
        gated_delta_recurrent(**x | {"v": x["v"][..., 1:]})
    with pytest.raises(ValueError, match=r"counted is torch.int64, not torch.int32"):
        gated_delta_recurrent(**x, counted=count(1, device).long())
    with pytest.raises(ValueError, match="3 value heads over 2 key heads"):
        gated_delta_recurrent(**x | {"state": x["state"][:3]})
