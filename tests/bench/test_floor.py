"""The bench counts what a forward reads."""

import math

import pytest

from clover_local.bench.floor import Operator, Rates, Widths, operators
from clover_local.bench.models import real_layers
from clover_local.checkpoint.parameters import count_parameters, parameter_shapes
from clover_local.config import ModelConfig

FLOAT32 = Widths(trunk=4, experts=4, head=4, cache=4)
NOT_PRODUCTS = ("embed_tokens", "norm", "conv", "A_log", "dt_bias", "bd_softmax")


def test_the_bytes_of_all_products_are_the_bytes_of_all_their_weights(
    golden_config: ModelConfig,
) -> None:
    weights = sum(
        math.prod(shape)
        for name, shape in parameter_shapes(golden_config).items()
        if not any(part in name for part in NOT_PRODUCTS)
    )
    parts = operators(
        golden_config,
        rows=1,
        committed=0,
        expert_uses=1,
        distinct=golden_config.num_experts * golden_config.num_hidden_layers,
        widths=FLOAT32,
    )
    state = {"GDN state", "attention"}
    assert sum(part.bytes for part in parts if part.name not in state) == 4 * weights


def test_a_token_of_the_real_layers_multiplies_with_the_active_parameters() -> None:
    config = real_layers()
    uses = config.num_experts_per_tok * config.num_hidden_layers
    parts = operators(config, rows=1, committed=0, expert_uses=uses, distinct=uses, widths=FLOAT32)
    products = sum(p.flops for p in parts if p.name not in {"GDN state", "attention"}) / 2
    active = count_parameters(config, diffusion=False).active
    assert products == pytest.approx(active, rel=1e-3)  # norms, convolutions and gates are the rest


def test_the_floor_of_an_operator_is_its_slower_side() -> None:
    rates = Rates(bytes_per_second=100.0, flops_per_second=1000.0)
    assert rates.seconds(Operator("reads", 500.0, 10.0)) == 5.0
    assert rates.seconds(Operator("multiplies", 10.0, 3000.0)) == 3.0


def test_more_rows_multiply_more_and_read_the_same() -> None:
    config = real_layers()
    one, many = (
        operators(config, rows=rows, committed=0, expert_uses=rows, distinct=1, widths=FLOAT32)[0]
        for rows in (1, 64)
    )
    assert one.bytes == many.bytes
    assert many.flops == 64 * one.flops


def test_a_narrower_part_reads_fewer_bytes() -> None:
    config = real_layers()
    wide, narrow = (
        {
            part.name: part
            for part in operators(
                config, rows=1, committed=8, expert_uses=8, distinct=8, widths=widths
            )
        }
        for widths in (FLOAT32, Widths(trunk=1, experts=0.5, head=2, cache=4))
    )
    ratios = {name: narrow[name].bytes / part.bytes for name, part in wide.items()}
    assert ratios["experts"] == 1 / 8
    assert ratios["lm_head"] == 1 / 2
    for name in ("GDN state", "attention", "router"):
        assert ratios.pop(name) == 1
    assert set(ratios.values()) == {1 / 8, 1 / 2, 1 / 4}
    assert all(narrow[name].flops == part.flops for name, part in wide.items())
