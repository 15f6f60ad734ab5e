"""The fused convolution of a GDN layer against the plain operators that it stands for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.kernels.gated_delta_commit import HeadShape, causal_conv
from clover_local.kernels.gated_delta_preview import block_conv
from clover_local.kernels.gpu.delta.gated_delta_conv import (
    CONFIGS,
    ConvConfig,
    Gates,
    Mixed,
    commit_conv,
    preview_conv,
)
from clover_local.kernels.norms import l2_norm

HEADS = HeadShape(key_heads=1, value_heads=3, key_dim=12, value_dim=20)
C = HEADS.channels
SIZES = [
    *((rows, torch.float32) for rows in (1, 2, 7, 16, 17, 32, 33)),
    (9, torch.float16),
    (9, torch.bfloat16),
]


class Layer:
    """What one layer gives the convolution: a projection's output, its state and its weights."""

    def __init__(self, rows: int, *, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        projected = normal(rows, C + 9 + 6).to(dtype)  # rows are apart, as in the model
        self.qkv, _, a, b = torch.split(projected, [C, 9, 3, 3], dim=1)
        self.gates = Gates(a=a * 8, b=b, rate=-normal(3).exp(), dt_bias=normal(3))
        self.state, self.taps, self.right = normal(3, C), normal(4, C), normal(3, C)

    def mixed(self, y: Tensor) -> Mixed:
        q, k, v = torch.split(y, [12, 12, 60], dim=1)
        a = self.gates.a.float() + self.gates.dt_bias
        return Mixed(
            q=l2_norm(q.view(len(y), 1, 12)),
            k=l2_norm(k.view(len(y), 1, 12)),
            v=v.view(len(y), 3, 20),
            g=self.gates.rate * F.softplus(a),
            beta=self.gates.b.float().sigmoid(),
        )


def same(mixed: Mixed, expected: Mixed) -> None:
    for name in ("q", "k", "v", "g", "beta"):
        torch.testing.assert_close(
            getattr(mixed, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_causal_form_is_the_plain_operators(rows: int, dtype: torch.dtype, device: str) -> None:
    x = Layer(rows, dtype=dtype, device=device)
    before = x.state.clone()
    mixed, after = commit_conv(x.qkv, x.state, taps=x.taps, gates=x.gates, heads=HEADS)
    y, expected = causal_conv(x.qkv, x.state, taps=x.taps)
    same(mixed, x.mixed(y))
    assert torch.equal(after, expected)
    assert torch.equal(x.state, before)


@pytest.mark.parametrize(("rows", "dtype"), SIZES, ids=str)
def test_form_of_a_block_is_the_plain_operators(rows: int, dtype: torch.dtype, device: str) -> None:
    x = Layer(rows, dtype=dtype, device=device)
    before = x.state.clone()
    mixed = preview_conv(
        x.qkv, x.state, taps=x.taps, right_taps=x.right, gates=x.gates, heads=HEADS
    )
    same(mixed, x.mixed(block_conv(x.qkv, x.state, taps=x.taps, right_taps=x.right)))
    assert torch.equal(x.state, before)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.block_rows}-rows")
def test_every_configuration_computes_the_same(config: ConvConfig, device: str) -> None:
    x = Layer(37, dtype=torch.float32, device=device)
    mixed, _ = commit_conv(x.qkv, x.state, taps=x.taps, gates=x.gates, heads=HEADS, config=config)
    same(mixed, x.mixed(causal_conv(x.qkv, x.state, taps=x.taps)[0]))


@pytest.mark.parametrize("counted", [0, 2, 11])
def test_only_counted_rows_enter_the_state_which_may_be_written_in_place(
    counted: int, device: str
) -> None:
    x = Layer(11, dtype=torch.float32, device=device)
    _, expected = causal_conv(x.qkv[:counted], x.state, taps=x.taps)
    _, after = commit_conv(
        x.qkv,
        x.state,
        taps=x.taps,
        gates=x.gates,
        heads=HEADS,
        counted=torch.tensor([counted], dtype=torch.int32, device=device),
        new_conv_state=x.state,
    )
    assert after is x.state
    assert torch.equal(after, expected)


def test_small_and_large_gates_keep_their_digits(device: str) -> None:
    x = Layer(7, dtype=torch.float32, device=device)
    a = torch.tensor([-80.0, -20.0, -5.0, 0.0, 5.0, 30.0, 80.0], device=device)
    gates = replace(
        x.gates, a=a[:, None].expand(7, 3).contiguous(), dt_bias=torch.zeros(3, device=device)
    )
    mixed, _ = commit_conv(x.qkv, x.state, taps=x.taps, gates=gates, heads=HEADS)
    expected = F.softplus(a.double())[:, None] * gates.rate.double()
    torch.testing.assert_close(mixed.g.double(), expected, rtol=1e-5, atol=0)


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    x = Layer(5, dtype=torch.float32, device=device)
    arguments: dict[str, Any] = {"taps": x.taps, "gates": x.gates, "heads": HEADS}
    with pytest.raises(ValueError, match=r"qkv is \[5, 83\], not \[5, 84\]"):
        commit_conv(x.qkv[:, 1:], x.state, **arguments)
    with pytest.raises(ValueError, match=r"conv state is \[2, 84\], not \[3, 84\]"):
        commit_conv(x.qkv, x.state[1:], **arguments)
    with pytest.raises(ValueError, match=r"conv state is torch.float64, not torch.float32"):
        commit_conv(x.qkv, x.state.double(), **arguments)
    with pytest.raises(ValueError, match=r"qkv has a last stride of 5, not 1"):
        commit_conv(x.qkv.T.contiguous().T, x.state, **arguments)
    with pytest.raises(ValueError, match=r"0 rows \(1 at least\), 4 taps"):
        commit_conv(x.qkv[:0], x.state, **arguments)
    with pytest.raises(ValueError, match=r"9 taps \(2 to 8\)"):
        commit_conv(x.qkv, x.state, **arguments | {"taps": torch.zeros(9, C, device=device)})
