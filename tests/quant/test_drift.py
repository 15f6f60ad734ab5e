"""Corrected weights: the least-squares answer to inputs and outputs that have drifted."""

import pytest
import torch
from torch import Tensor

from clover_local.quant.drift import corrected

ROWS, N, K = 400, 5, 11


def example(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, x, x^ and the drift, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, x, drift = normal(N, K), normal(rows, K), normal(rows, N)
    return weight, x, x + 0.2 * normal(rows, K) + 0.1 * x @ normal(K, K), 0.3 * drift


def means(x: Tensor, drifted: Tensor, drift: Tensor) -> dict[str, Tensor]:
    rows = max(len(x), 1)
    return {
        "hessian": drifted.T @ drifted / rows,
        "cross": (x - drifted).T @ drifted / rows,
        "drift": drift.T @ drifted / rows,
    }


def test_corrected_weight_is_the_least_squares_answer() -> None:
    weight, x, drifted, drift = example(1)
    result = corrected(weight, **means(x, drifted, drift), damp=1e-12)
    assert result.dtype == torch.float64
    best = torch.linalg.lstsq(drifted, x @ weight.T + drift).solution.T
    torch.testing.assert_close(result, best, rtol=1e-8, atol=1e-8)
    assert not torch.allclose(best, weight, atol=0.1)


def test_damping_is_a_ridge_around_the_weight_itself() -> None:
    weight, x, drifted, drift = example(2)
    of = means(x, drifted, drift)
    ridge = 0.3 * of["hessian"].diagonal().mean()
    inputs = torch.cat([drifted, (ROWS * ridge).sqrt() * torch.eye(K, dtype=torch.float64)])
    outputs = torch.cat([x @ weight.T + drift, (ROWS * ridge).sqrt() * weight.T])
    best = torch.linalg.lstsq(inputs, outputs).solution.T
    torch.testing.assert_close(corrected(weight, **of, damp=0.3), best, rtol=1e-8, atol=1e-8)


def test_batched_equals_one_by_one() -> None:
    examples = [example(seed, rows=12 + seed) for seed in range(3)]
    each = [means(*rest) for _, *rest in examples]
    weight = torch.stack([one for one, *_ in examples])
    together = {key: torch.stack([one[key] for one in each]) for key in each[0]}
    result = corrected(weight, **together, damp=0.01)
    for one, of, expected in zip(result, each, weight, strict=True):
        torch.testing.assert_close(one, corrected(expected, **of, damp=0.01))


@pytest.mark.parametrize("rows", [0, ROWS], ids=["no-rows", "no-drift"])
def test_weight_stays_itself_where_nothing_has_drifted(rows: int) -> None:
    weight, x, *_ = example(3, rows)
    nothing = torch.zeros(rows, N, dtype=torch.float64)
    result = corrected(weight.bfloat16(), **means(x, x, nothing), damp=0.01)
    assert result.dtype == torch.float32
    assert torch.equal(result, weight.bfloat16().float())


def test_few_rows_and_dead_inputs_give_a_finite_answer() -> None:
    weight, x, drifted, drift = example(4, rows=3)
    drifted[:, 7] = 0
    of = {key: value.float() for key, value in means(x, drifted, drift).items()}
    result = corrected(weight.float(), **of, damp=1e-9)
    assert bool(torch.isfinite(result).all())
    assert torch.equal(result[:, 7], weight.float()[:, 7])
    outputs = (x @ weight.T + drift).float()
    before, after = (
        (drifted.float() @ each.T - outputs).norm() for each in (weight.float(), result)
    )
    assert after < 0.5 * before


@pytest.mark.parametrize(
    ("shapes", "damp", "message"),
    [
        (((K, K), (K, K - 1), (N, K)), 0.01, r"\(11, 10\) for weights of \(5, 11\)"),
        (((K, K), (K, K), (K, N)), 0.01, r"drift is \(11, 5\) for weights of \(5, 11\)"),
        (((K, K), (K, K), (N, K)), 0.0, "damp 0.0"),
    ],
    ids=["cross", "drift", "damp"],
)
def test_wrong_calls_are_refused(
    shapes: tuple[tuple[int, int], ...], damp: float, message: str
) -> None:
    hessian, cross, drift = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        corrected(torch.zeros(N, K), hessian, cross=cross, drift=drift, damp=damp)
