"""Random models, and what weights take in memory."""

import pytest
import torch

from clover_local.bench.models import random_model, random_packed, widths
from clover_local.cache import SequenceState
from clover_local.config import ModelConfig


def test_widths_are_those_of_the_weights_in_memory(golden_config: ModelConfig) -> None:
    plain = widths(random_model(golden_config))
    assert (plain.trunk, plain.experts, plain.head, plain.cache) == (4, 4, 4, 4)
    packed = widths(random_model(golden_config, weights="int4"))
    # groups of the golden model: 64 and 32 columns of 4 bits, 64, 32 or 16 of 8 bits
    assert packed.head == 1 + 2 / 64
    assert 0.5 + 2 / 64 < packed.experts < 0.5 + 2 / 32
    assert 1 + 2 / 64 <= packed.trunk <= 1 + 2 / 16


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_draws_have_the_deviation_of_plain_ones(bits: int) -> None:
    weight = random_packed((256, 1024), bits=bits, generator=torch.Generator().manual_seed(1))
    assert weight.group_size == (128 if bits == 4 else 64)
    assert weight.dequantize().std().item() == pytest.approx(1024**-0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_random_models_run(kind: str, golden_config: ModelConfig) -> None:
    model = random_model(golden_config, weights="int4" if kind == "int4" else "float32")
    state = SequenceState(golden_config, context=64, device="cpu", dtype=torch.float32)
    assert model.commit([1, 2, 3], state).logits.isfinite().all()
    assert model.preview([4] * 5, state).logits.isfinite().all()
