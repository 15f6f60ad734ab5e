"""The block operators of a GDN layer against their formulas, row by row in float64."""

import math

import pytest
import torch

from clover_local.kernels.gated_delta_commit import causal_conv
from clover_local.kernels.gated_delta_preview import block_conv, block_softmax
from clover_local.kernels.norms import l2_norm


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_block_conv_is_the_formula(rows: int) -> None:
    torch.manual_seed(rows)
    qkv, before = torch.randn(rows, 7), torch.randn(3, 7)
    taps, right = torch.randn(4, 7), torch.randn(3, 7)
    y = block_conv(qkv, before, taps=taps, right_taps=right)
    seen = torch.cat([before, qkv]).double()
    for t in range(rows):
        z = (seen[t : t + 4] * taps.double()).sum(0)
        for d in (1, 2, 3):
            if t + d < rows:
                z = z + qkv[t + d].double() * right[d - 1].double()
        torch.testing.assert_close(y[t], (z * torch.sigmoid(z)).float())


def test_block_conv_without_right_taps_is_the_causal_one() -> None:
    torch.manual_seed(1)
    qkv, before, taps = torch.randn(5, 7), torch.randn(3, 7), torch.randn(4, 7)
    y = block_conv(qkv, before, taps=taps, right_taps=torch.zeros(3, 7))
    assert torch.equal(y, causal_conv(qkv, before, taps=taps)[0])


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_block_softmax_is_the_formula(rows: int) -> None:
    torch.manual_seed(rows)
    h_k, h_v, dk, dv = 2, 6, 12, 20
    q, k = l2_norm(torch.randn(rows, h_k, dk)), l2_norm(torch.randn(rows, h_k, dk))
    v, g, state = torch.randn(rows, h_v, dv), -torch.rand(rows, h_v), torch.randn(h_v, dk, dv)
    scale, bias, c = torch.randn(3, h_v) * 2
    before = state.clone()
    out = block_softmax(
        q,
        k,
        v=v,
        g=g,
        state=state,
        logit_scale=scale,
        history_bias=bias,
        history_c=c,
        block_size=32,
    )
    assert torch.equal(state, before)
    q, k, v, g, state = (x.double() for x in (q, k, v, g, state))
    for h in range(h_v):
        key_head = h // 3
        history = bias[h].double() + c[h].double() * math.log(rows / 32)
        for t in range(rows):
            scores = k[:, key_head] @ q[t, key_head] * scale[h].double()
            p = torch.cat([scores, history[None]]).softmax(0)
            read = state[h].T @ q[t, key_head] / dk**0.5
            expected = p[:-1] @ v[:, h] + p[-1] * g[t, h].exp() * read
            torch.testing.assert_close(out[t, h], expected.float(), rtol=1e-5, atol=1e-5)
