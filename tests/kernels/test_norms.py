"""Norms and the rotary embedding against their formulas."""

import math

import pytest
import torch

from clover_local.kernels.norms import gated_rms_norm, l2_norm, rms_norm, rotary, rotary_angles

EPS = 1e-6


def test_rms_norm_is_zero_centred() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 5, 17), torch.randn(17)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight.double())
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS), expected.float())


def test_rms_norm_computes_bfloat16_in_float32() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(4, 33).bfloat16(), torch.randn(33).bfloat16()
    exact = rms_norm(x.float(), weight.float(), eps=EPS)
    assert torch.equal(rms_norm(x, weight, eps=EPS), exact.bfloat16())


def test_gated_rms_norm_has_a_plain_weight_and_the_dtype_of_its_gate() -> None:
    torch.manual_seed(3)
    x, weight, gate = torch.randn(5, 2, 9), torch.randn(9), torch.randn(5, 2, 9)
    wide, g = x.double(), gate.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = (normed * weight.double() * g * g.sigmoid()).float()
    torch.testing.assert_close(gated_rms_norm(x, weight, gate=gate, eps=EPS), expected)
    assert gated_rms_norm(x, weight, gate=gate.bfloat16(), eps=EPS).dtype == torch.bfloat16


def test_l2_norm_gives_unit_length_and_keeps_zero() -> None:
    torch.manual_seed(4)
    x = torch.cat([torch.randn(6, 13), torch.zeros(1, 13)])
    lengths = l2_norm(x).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.tensor([1.0] * 6 + [0.0]))


def test_rotary_pairs_the_halves_and_leaves_the_rest() -> None:
    cos, sin = rotary_angles(torch.tensor([3]), theta=100.0, rotary_dim=4)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]])
    first, second = 3.0, 3.0 * 100.0**-0.5
    expected = [
        1 * math.cos(first) - 3 * math.sin(first),
        2 * math.cos(second) - 4 * math.sin(second),
        3 * math.cos(first) + 1 * math.sin(first),
        4 * math.cos(second) + 2 * math.sin(second),
        5.0,
        6.0,
        7.0,
    ]
    torch.testing.assert_close(rotary(x, cos=cos, sin=sin)[0, 0], torch.tensor(expected))


@pytest.mark.parametrize("position", [0, 77, 131_071])
def test_angles_are_exact_at_any_position(position: int) -> None:
    cos, sin = rotary_angles(torch.tensor([position]), theta=1e7, rotary_dim=64)
    for i in (0, 1, 5, 31):
        angle = position * 1e7 ** (-2 * i / 64)
        assert cos[0, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert sin[0, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_products_of_rotated_vectors_depend_on_the_distance_only() -> None:
    torch.manual_seed(5)
    q, k = torch.randn(2, 1, 1, 24)
    dots = []
    for start in (0, 41):
        cos, sin = rotary_angles(torch.tensor([start, start + 6]), theta=1e4, rotary_dim=6)
        turned_q = rotary(q, cos=cos[:1], sin=sin[:1])
        turned_k = rotary(k, cos=cos[1:], sin=sin[1:])
        dots.append((turned_q * turned_k).sum())
    torch.testing.assert_close(dots[0], dots[1])
    assert not torch.isclose(dots[0], (q * k).sum(), atol=1e-3)
