"""The routed experts of one layer: Hessians from the rows that each saw, then rounding, in waves.

Down projections see what the quantized gate and up make of the rows, so a wave goes through the
layer's rows twice. GPTQ's targets are what the source's experts make of the source's rows; down
projections make good what the hidden states lack of the source's as well: the routing weights of a
row sum to 1, so what every expert adds is added once (see `quant/drift.py`).

The memory limit decides how many experts a wave has and nothing else: experts are quantized in
batches of a fixed number, so that every limit gives the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clover_local.errors import CloverError
from clover_local.kernels.packed import Weight
from clover_local.quant.allocator import give_back
from clover_local.quant.drift import corrected
from clover_local.quant.gptq import gptq_quantize
from clover_local.quant.hessian import outer, relative_error, shrink
from clover_local.quant.memory import MemoryPlan
from clover_local.quant.nf4 import nf4_round
from clover_local.quant.pipeline.routed import RoutedRows, Sums
from clover_local.quant.pipeline.source import is_finite
from clover_local.quant.profiles import AS_SOURCE, Recipe
from clover_local.quant.report import DampedExpert, ExpertReport, spread
from clover_local.quant.rounding import QuantizedWeight, round_to_nearest, searched_scale

EXPERT_BITS = 4
SAFE_BITS = 8  # of down projections that INT4 damages too much
PRIOR = 1.0
"""Rows, as a multiple of K, that the layer's pooled Hessian counts for in an expert's own."""
GATE_UP_SHARE = 0.8  # of a wave's time
ERROR_ROWS = 128
"""Rows of a matrix from which its output error is estimated; all would cost more than GPTQ."""
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"

ReadExperts = Callable[[Sequence[int]], list[tuple[Weight, Weight]]]


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """The experts of a layer, in order, as they are stored."""

    pairs: list[tuple[Weight, Weight]]  # gate_up [2F, D], down [D, F]
    reports: list[ExpertReport]
    damped: list[DampedExpert]
    dead_inputs: int


def quantize_experts(
    rows: RoutedRows,
    read: ReadExperts,
    *,
    inner_size: int,
    recipe: Recipe,
    plan: MemoryPlan,
    on_progress: Callable[[float], None] = lambda share: None,
) -> QuantizedExperts:
    """Quantizes every expert of a layer.

    Args:
        read: gives (gate_up, down) of experts, unquantized.
        inner_size: F, inputs of a down projection.
        on_progress: called with the share that is done.

    Raises:
        CloverError: no row reached any expert, or rows or weights are not finite.
    """
    counts = rows.weighted_counts()
    pooled = rows.pooled()
    pooled_down = _pooled_down(rows, read, inner_size=inner_size, batch=plan.batch)
    gate_up = _Rounder(recipe, EXPERT_BITS, kinds=(GATE, UP))
    downs = [_Rounder(recipe, EXPERT_BITS, kinds=(DOWN,))]
    if recipe.down_error_limit is not None and recipe.method != "nf4":
        downs.append(_Rounder(recipe, SAFE_BITS, kinds=(DOWN,)))
    for start in range(0, rows.num_experts, plan.wave):
        end = min(start + plan.wave, rows.num_experts)
        batches = _batches(range(start, end), plan.batch)
        sums = rows.sums(batches, lambda expert, x: x, width=rows.x.width)
        rounded: dict[int, Tensor] = {}
        source: dict[int, Tensor] = {}
        for batch in batches:
            weight = _stacked(read(batch), 0, rows.device)
            means = _means(sums.pop(0), counts[batch.start : batch.stop], pooled)
            rounded |= zip(batch, gate_up.add(weight, means, batch), strict=True)
            if rows.source is not None:
                source |= zip(batch, weight, strict=True)
            on_progress((start + GATE_UP_SHARE * (batch.stop - start)) / rows.num_experts)
        sums = rows.sums(
            batches,
            _Inner(rounded),
            width=inner_size,
            source_inputs=_Inner(source),
            with_drift=True,
        )
        del rounded, source
        for batch in batches:
            weight = _stacked(read(batch), 1, rows.device)
            means = _means(sums.pop(0), counts[batch.start : batch.stop], pooled_down)
            for down in downs:
                down.add(weight, means, batch)
        give_back()
        on_progress(end / rows.num_experts)
    return _result(gate_up, downs, limit=recipe.down_error_limit)


def _result(
    gate_up: "_Rounder", downs: "list[_Rounder]", *, limit: float | None
) -> QuantizedExperts:
    """With the safe down projections where INT4 loses too much."""
    down, safe = downs[0], downs[-1]
    (report,) = down.reports()
    if limit is not None and report.method is not None and report.method.median > limit:
        down = safe
    return QuantizedExperts(
        pairs=list(zip(gate_up.weights, down.weights, strict=True)),
        reports=gate_up.reports() + down.reports(),
        damped=gate_up.damped + down.damped,
        dead_inputs=gate_up.dead_inputs + down.dead_inputs,
    )


class _Inner:
    """What down projections get: silu(x gate^T) * (x up^T)."""

    def __init__(self, gate_up: dict[int, Tensor]) -> None:
        """Takes [2F, D] by expert, in any dtype."""
        self.gate_up = gate_up

    def __call__(self, expert: int, x: Tensor) -> Tensor:
        gate, up = (x @ self.gate_up[expert].to(x).T).chunk(2, dim=-1)
        return F.silu(gate) * up


class _Rounder:
    """Rounds one kind of matrix of all experts, batch by batch, and keeps account."""

    def __init__(self, recipe: Recipe, bits: int, *, kinds: tuple[str, ...]) -> None:
        """`kinds` are the parts of the matrix, equally many rows each, one below the other."""
        self.recipe = recipe
        self.bits = bits
        self.kinds = kinds
        self.weights: list[Weight] = []
        self.damped: list[DampedExpert] = []
        self.dead_inputs = 0
        self._rtn_errors: list[list[float]] = [[] for _ in kinds]
        self._errors: list[list[float]] = [[] for _ in kinds]

    def add(self, weight: Tensor, means: Sums, batch: range) -> Tensor:
        """Rounds the next experts; returns what their weights are now, [b, N, K] float32.

        Args:
            weight: [b, N, K] in the source's dtype.
            means: the sums, over an expert's rows and the prior ones, divided by their number.
        """
        target = plain = weight.float()
        rtn = round_to_nearest(plain, bits=self.bits, group_size=self.recipe.group_size)
        rtn_values = rtn.dequantize()
        if self.recipe.method == "rtn":
            values = rtn_values
            self.weights += _packed(rtn)
        elif self.recipe.method == "nf4":
            values = nf4_round(plain)
            self.weights += [value.to("cpu", weight.dtype) for value in values]
        else:
            target = self._target(plain, means)
            quantized = self._gptq(target, means.outer, batch)
            values = quantized.dequantize()
            self.weights += _packed(quantized)
        self._account(self._rtn_errors, plain, rtn_values, means.outer)
        self._account(self._errors, target, values, means.outer)
        return values

    def reports(self) -> list[ExpertReport]:
        """One for each kind."""
        is_nf4 = self.recipe.method == "nf4"
        return [
            ExpertReport(
                kind=kind,
                bits=AS_SOURCE if is_nf4 else self.bits,
                group_size=None if is_nf4 else self.recipe.group_size,
                rtn=spread(rtn_errors),
                method=spread(errors),
                worst_expert=max(range(len(errors)), key=errors.__getitem__),
            )
            for kind, rtn_errors, errors in zip(
                self.kinds, self._rtn_errors, self._errors, strict=True
            )
        ]

    def _target(self, weight: Tensor, means: Sums) -> Tensor:
        """What is rounded: the weight, unless its inputs or the hidden states have drifted."""
        if means.cross is None:
            return weight
        damp = self.recipe.damp
        return corrected(weight, means.outer, cross=means.cross, drift=means.drift, damp=damp)

    def _gptq(self, weight: Tensor, hessian: Tensor, batch: range) -> QuantizedWeight:
        result = gptq_quantize(
            weight,
            hessian,
            bits=self.bits,
            group_size=self.recipe.group_size,
            damp=self.recipe.damp,
            find_scale=searched_scale,
        )
        self.dead_inputs += int(result.dead.sum())
        self.damped += [
            DampedExpert(self.kinds[0], expert, damp)
            for expert, damp in zip(batch, result.damp.tolist(), strict=True)
            if damp > 2 * self.recipe.damp  # it is raised tenfold
        ]
        return result.weight

    def _account(
        self, errors: list[list[float]], weight: Tensor, values: Tensor, hessian: Tensor
    ) -> None:
        """Adds the error of each expert, by kind, from some rows of each, evenly spread."""
        parts = [each.chunk(len(self.kinds), dim=1) for each in (weight, values)]
        for of_kind, part, approximation in zip(errors, *parts, strict=True):
            some = slice(None, None, max(1, part.shape[1] // ERROR_ROWS))
            of_kind += relative_error(part[:, some], approximation[:, some], hessian).tolist()


def _pooled_down(rows: RoutedRows, read: ReadExperts, *, inner_size: int, batch: int) -> Tensor:
    """The mean outer product of what down projections see, over all experts.

    Estimated from a sample of the rows and unquantized gates and ups: F is small, and a row gives
    as many inputs as it has experts; all rows would cost as much as running the layer once more.
    """
    total = torch.zeros(inner_size, inner_size, device=rows.device)
    seen = 0.0
    sample = rows.sample()
    for experts in _batches(range(rows.num_experts), batch):
        for expert, (gate_up, _) in zip(experts, read(experts), strict=True):
            if isinstance(gate_up, Tensor):
                inner = _Inner({expert: gate_up.to(rows.device).float()})
                x, weights = sample.of(expert)
                total += outer(inner(expert, x), weights=weights)
                seen += float(weights.double().sum())
    return total / max(seen, 1.0)


def _means(sums: Sums, counts: Tensor, pooled: Tensor) -> Sums:
    """Sums as means over an expert's rows and the prior ones, which have not drifted."""
    prior = PRIOR * pooled.shape[-1]
    hessian = shrink(sums.outer, rows=counts, pooled=pooled, pooled_rows=1.0, prior_rows=prior)
    rows = (counts + prior)[:, None, None]
    cross, drift = (None if each is None else each.div_(rows) for each in (sums.cross, sums.drift))
    if not all(each is None or is_finite(each) for each in (hessian, cross, drift)):
        raise CloverError(
            "the calibration text gives hidden states that are no numbers: "
            "check the checkpoint with `clover-local verify`"
        )
    return Sums(hessian, cross, drift)


def _stacked(pairs: Sequence[tuple[Weight, Weight]], part: int, device: str) -> Tensor:
    """One of the two matrices of each expert, [b, N, K], in the source's dtype."""
    weights = [pair[part] for pair in pairs]
    return torch.stack([weight.to(device) for weight in weights if isinstance(weight, Tensor)])


def _packed(weight: QuantizedWeight) -> list[Weight]:
    return [one.pack().to("cpu") for one in weight.unbind()]


def _batches(experts: range, size: int) -> list[range]:
    return [
        range(start, min(start + size, experts.stop))
        for start in range(experts.start, experts.stop, size)
    ]
