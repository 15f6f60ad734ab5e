"""The kernel of a block's softmax against the plain operators that it stands for."""

import pytest
import torch
from torch import Tensor

from clover_local.kernels.gated_delta_preview import DiffusionWeights, block_softmax
from clover_local.kernels.gpu.delta.gated_delta_preview import normed_block_softmax
from clover_local.kernels.norms import gated_rms_norm, l2_norm

H_K, H_V, DK, DV = 2, 4, 40, 20
EPS = 1e-6
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Block:
    """The rows of one block, and a layer's state and scalars."""

    def __init__(self, rows: int, *, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        keys = l2_norm(normal(rows, 2 * H_K, DK)).flatten(1)
        y = torch.cat([keys, normal(rows, H_V * DV)], dim=1)
        q, k, v = torch.split(y, [H_K * DK, H_K * DK, H_V * DV], dim=1)
        self.q, self.k = q.view(rows, H_K, DK), k.view(rows, H_K, DK)
        self.v = v.view(rows, H_V, DV)
        self.g, self.state = -normal(rows, H_V).exp(), normal(H_V, DK, DV)
        self.diffusion = DiffusionWeights(
            right_taps=normal(3, 1),  # of the convolution, which comes before
            logit_scale=normal(H_V) * 4,
            history_bias=normal(H_V),
            history_c=normal(H_V),
        )
        self.z = normal(rows, 7 + H_V * DV).to(dtype)[:, 7:].view(rows, H_V, DV)
        self.norm = normal(DV)

    def kernel(self) -> Tensor:
        return normed_block_softmax(
            self.q,
            self.k,
            v=self.v,
            g=self.g,
            state=self.state,
            diffusion=self.diffusion,
            block_size=32,
            z=self.z,
            norm_weight=self.norm,
            eps=EPS,
        )

    def plain(self) -> Tensor:
        out = block_softmax(
            self.q,
            self.k,
            v=self.v,
            g=self.g,
            state=self.state,
            logit_scale=self.diffusion.logit_scale,
            history_bias=self.diffusion.history_bias,
            history_c=self.diffusion.history_c,
            block_size=32,
        )
        return gated_rms_norm(out, self.norm, gate=self.z, eps=EPS)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33])
def test_kernel_is_the_plain_operators(rows: int, dtype: torch.dtype, device: str) -> None:
    x = Block(rows, dtype=dtype, device=device)
    before = x.state.clone()
    out, expected = x.kernel(), x.plain()
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x.state, before)


def test_extreme_logits_stay_finite(device: str) -> None:
    x = Block(7, dtype=torch.float32, device=device)
    x.diffusion.history_bias.copy_(torch.tensor([-200.0, 200.0, 0.0, 0.0], device=device))
    x.diffusion.logit_scale.copy_(torch.tensor([1.0, 1.0, 300.0, -300.0], device=device))
    x.g[2] = -torch.inf
    torch.testing.assert_close(x.kernel(), x.plain(), rtol=1e-4, atol=1e-4)


def test_tensors_that_do_not_fit_are_refused_with_both_values(device: str) -> None:
    with pytest.raises(ValueError, match="65 rows, 1 to 64 are possible"):
        Block(65, dtype=torch.float32, device=device).kernel()
    x = Block(3, dtype=torch.float32, device=device)
    x.z = x.z[:2]
    with pytest.raises(ValueError, match=r"z is \[2, 80\], not \[3, 80\]"):
        x.kernel()
    x = Block(3, dtype=torch.float32, device=device)
    x.norm = x.norm.half()
    with pytest.raises(ValueError, match=r"norm weight is torch.float16, not torch.float32"):
        x.kernel()
