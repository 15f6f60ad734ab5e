"""Random models, and what weights take in memory."""

import pytest
import torch

from clover_local.bench.models import random_model, random_packed, real_layers, trunk, widths
from clover_local.cache import SequenceState
from clover_local.config import ModelConfig
from clover_local.kernels.choice import VARIABLE
from clover_local.kernels.gpu import bench
from clover_local.kernels.packed import PackedWeight


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


def test_the_bench_of_kernels_has_the_products_of_the_real_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    model = random_model(
        real_layers(layers=4, experts=8, vocabulary=248320),
        weights="int4",
        head_bits=4,
        device="meta",
        dtype=torch.bfloat16,
    )
    products = [*trunk(model), model.head.lm_head]
    weights = [weight for product in products for weight in product.weights]
    ours = {(*w.shape, w.bits, w.nbytes) for w in weights if isinstance(w, PackedWeight)}
    assert ours == {(m.features, m.columns, m.bits, m.nbytes) for m in bench.MAPS}
    assert len(weights) == 2 * 4 + 1
    for layer in model.layers:
        assert layer.moe.shared.slots is not None
        assert layer.moe.shared.slots.layout == bench.shared_layout()
        assert layer.moe.router.shape == (8 + 1, bench.HIDDEN)


def test_slots_have_the_widths_of_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    config = real_layers(layers=4, experts=8)
    model = random_model(config, weights="int4", device="meta", dtype=torch.bfloat16)
    found = widths(model)
    assert (found.trunk, found.experts) == (1 + 2 / 64, 0.5 + 2 / 128)
    assert (found.head, found.cache) == (1 + 2 / 64, 2)
