"""What `clover-local quantize` takes for Clover-35B-A3B on this machine: memory, disk and hours.

    python recipes/quantization_cost.py [--memory 12GiB] [--tokens 65536] [--profile balanced]

Memory and disk are the arithmetic of `quant/memory.py`. Time is computed: the products of each
stage are counted, and the rates that they run at are measured here, on the real shapes of one
expert. Nothing of the model itself is needed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from clover_local.bench.models import real_layers
from clover_local.config import ModelConfig
from clover_local.errors import CloverError
from clover_local.kernels import dispatch
from clover_local.memory.sizes import parse_bytes
from clover_local.quant.drift import corrected
from clover_local.quant.gptq import gptq_quantize
from clover_local.quant.grouped import ROWS_TOGETHER
from clover_local.quant.hessian import outer, relative_error
from clover_local.quant.memory import DEFAULT_LIMIT, disk_needed, plan_waves, shown
from clover_local.quant.profiles import Choices, Recipe, resolve
from clover_local.quant.rounding import round_to_nearest, searched_scale

PREVIEW_ROWS = 1.0  # a token, at most: the blocks of answers tile a text
SEQUENCE_ROWS = 1056  # of the longest sequence with its previews
PASSES_OF_ERRORS = 4  # RTN's and GPTQ's errors, of gate and of up
ERROR_ROWS = 128
READ_RATE = 1e9  # bytes a second, said to be assumed

REAL = real_layers(layers=40, experts=256, vocabulary=248_320)


@dataclass(frozen=True)
class Rates:
    """Measured on this machine."""

    product: float  # float32 operations a second, in sums of outer products
    packed: float  # in products with packed weights
    expert: float  # seconds of GPTQ, its targets and errors for one expert


@dataclass(frozen=True)
class Hours:
    """Computed time, by what takes it."""

    hessians: float
    rounding: float
    running: float  # the quantized model, and the source beside it
    comparing: float
    reading: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.hessians + self.rounding + self.running + self.comparing + self.reading


def measure(config: ModelConfig) -> Rates:
    """Times each kind of work on the shapes of one expert."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, hidden, generator=generator)
    hessian = (outer(x) / len(x) + torch.eye(hidden))[None]
    gate_up = torch.randn(1, 2 * inner, hidden, generator=generator) * 0.02
    down = torch.randn(1, hidden, inner, generator=generator) * 0.02
    (packed,) = round_to_nearest(gate_up).unbind()
    weight = packed.pack()

    def quantize() -> None:
        for matrix, own in ((gate_up, hessian), (down, hessian[:, :inner, :inner].contiguous())):
            target = corrected(matrix, own, cross=own, damp=0.01)
            done = gptq_quantize(target, own, find_scale=searched_scale).weight.dequantize()
            for _ in range(PASSES_OF_ERRORS):
                relative_error(matrix[:, :ERROR_ROWS], done[:, :ERROR_ROWS], own)

    return Rates(
        product=2 * x.numel() * hidden / seconds(lambda: outer(x)),
        packed=2 * x.numel() * 2 * inner / seconds(lambda: dispatch.linear(x, weight)),
        expert=seconds(quantize),
    )


def seconds(work: Callable[[], object], *, runs: int = 5) -> float:
    """The least time of some runs."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def hours(config: ModelConfig, recipe: Recipe, rates: Rates) -> Hours:
    """How long each kind of work takes for the whole model."""
    rows = (1 + PREVIEW_ROWS) * recipe.calibration_tokens
    evaluated = 2 * (1 + PREVIEW_ROWS) * recipe.evaluation_tokens  # by two models
    layers, hidden, inner = (
        config.num_hidden_layers,
        config.hidden_size,
        config.moe_intermediate_size,
    )
    uses = config.num_experts_per_tok
    trunk = 2 * 33e6  # operations a row; attention over 512 positions is small beside it
    experts = 2 * uses * 3 * hidden * inner
    # With the source's rows too: Hessians and cross products of both matrices, drift of down.
    outer_products = 2 * (2 * uses + 1) * hidden**2 + 2 * uses * (2 * inner**2 + hidden * inner)
    inner_products = 2 * 2 * uses * 2 * hidden * inner  # of gate and up, quantized and not
    numbers = 3 * hidden * inner * config.num_experts * layers
    readings = 5 + (rows + evaluated) / ROWS_TOGETHER  # the source's experts, group by group
    head = 2 * hidden * config.vocab_size * evaluated / rates.product
    return Hours(
        hessians=layers * rows * (outer_products + inner_products) / rates.product / 3600,
        rounding=layers * config.num_experts * rates.expert / 3600,
        running=layers
        * rows
        * ((2 * trunk + experts) / rates.packed + (trunk + experts) / rates.product)
        / 3600,
        comparing=(layers * evaluated * (trunk + experts) / rates.product + head) / 3600,
        reading=readings * 2 * numbers / READ_RATE / 3600,
    )


def main() -> int:
    """Prints the tables; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--memory", default=shown(DEFAULT_LIMIT))
    parser.add_argument("--tokens", type=int, default=Choices.calibration_tokens)
    parser.add_argument("--profile", default=Choices.profile)
    arguments = parser.parse_args()
    config = REAL
    try:
        choices = Choices(profile=arguments.profile, calibration_tokens=arguments.tokens)
        recipe, _ = resolve(choices, config, device="cpu")
        limit = parse_bytes(arguments.memory, "--memory")
        plan = plan_waves(config, recipe, limit=limit, rows=SEQUENCE_ROWS)
    except CloverError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"waves of {plan.wave} experts ({plan.waves} a layer); peak of each stage:")
    for stage, nbytes in plan.stages.items():
        print(f"  {stage:<12} {shown(nbytes)}")
    rows = int((1 + PREVIEW_ROWS) * recipe.calibration_tokens)
    print(f"disk: {disk_needed(config, recipe, rows=rows) / 1e9:.1f} GB")
    rates = measure(config)
    print(
        f"measured with {torch.get_num_threads()} threads: {rates.product / 1e9:.0f} GFLOP/s in "
        f"float32, {rates.packed / 1e9:.0f} with INT4 weights, {rates.expert:.2f} s an expert"
    )
    computed = hours(config, recipe, rates)
    print(f"computed time: {computed.total:.1f} h for {recipe.calibration_tokens} tokens")
    for name in ("hessians", "rounding", "running", "comparing", "reading"):
        print(f"  {name:<12} {getattr(computed, name):.2f} h")
    return 0


if __name__ == "__main__":
    sys.exit(main())
