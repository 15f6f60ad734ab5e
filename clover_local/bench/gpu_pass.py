"""Times whole passes of random weights in the real model's shapes on a GPU, beside their floor.

    python -m clover_local.bench.gpu_pass [--layers N] [--experts N] [--head-bits 4|8]
                                          [--repeats N] [--json]

INT4 experts in groups of 128 and INT8 elsewhere in groups of 64. The floor is what a forward cannot
do without reading, at the rate of a copy measured in the same run, and a graph of one kernel. With
fewer layers than the real model's 40 the model fits smaller cards; ratios mean the same, the prompt
is faster by about as much.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton

from clover_local.bench.card import Card, CudaCard
from clover_local.bench.floor import Widths
from clover_local.bench.gpu_forwards import Bench, Forward, Loop, Prompt, Rate, Sizes, least_bytes
from clover_local.bench.models import real_layers
from clover_local.config import ModelConfig
from clover_local.kernels.gpu.bench import Figure

LAYERS, EXPERTS, VOCABULARY, CONTEXT = 40, 256, 248320, 8192
PATTERN = 4
"""Three GDN layers and one of attention; other numbers of layers change their shares."""
RESERVED_BYTES = 5 << 29
"""For states, graphs, and the rows of a prompt's chunk."""
PACKED = {4: 0.5 + 2 / 128, 8: 1 + 2 / 64}
"""Bytes of a number and its share of a scale, by bits."""


@dataclass(frozen=True)
class Goal:
    """One of the goals for the card."""

    id: str
    says: str
    value: float
    wanted: str


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    card: str
    layers: int
    experts: int
    head_bits: int
    rate: Rate
    figure: Figure  # of a layer's experts
    forwards: tuple[Forward, ...]
    loop: Loop
    prompt: Prompt

    def goals(self) -> tuple[Goal, ...]:
        """The measured values of the goals that this bench is about."""
        figure, copy = self.figure, self.rate.bytes_per_second
        if figure.plain_seconds is None:
            raise ValueError(f"{figure.name} has no time of the plain kernel")
        return (
            *(Goal("P1", f"{f.name}: time by floor", f.ratio, "<= 1.35") for f in self.forwards),
            Goal("P2", "experts: bytes by copy rate", figure.bytes_per_second / copy, ">= 0.85"),
            Goal(
                "P3", "plain kernel's time by ours", figure.plain_seconds / figure.seconds, ">= 2"
            ),
            Goal("P18", "share of a pass outside the device", self.loop.host_share, "<= 0.03"),
            Goal("P20", "prompt: tokens a second", self.prompt.tokens_per_second, ">= 4000"),
            Goal("P20", "seconds to first block", self.prompt.first_block_seconds, "<= 1.3"),
        )


def weight_bytes(config: ModelConfig, *, head_bits: int) -> float:
    """Bytes of all weights on the device."""
    packed = Widths(trunk=PACKED[8], experts=PACKED[4], head=PACKED[head_bits], cache=2)
    every = config.num_experts * config.num_hidden_layers
    embedding = 2 * config.vocab_size * config.hidden_size
    return embedding + least_bytes(config, packed, rows=1, committed=0, distinct=every)


def fitting_layers(free_bytes: int, *, experts: int, head_bits: int) -> int:
    """The most layers of the real model, a multiple of 4, that fit; 0 if none do."""
    for layers in range(LAYERS, 0, -PATTERN):
        config = real_layers(layers=layers, experts=experts, vocabulary=VOCABULARY)
        if weight_bytes(config, head_bits=head_bits) + RESERVED_BYTES <= free_bytes:
            return layers
    return 0


def measure(
    config: ModelConfig,
    card: Card,
    *,
    head_bits: int,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes | None = None,
    on_fallback: Callable[[str], None],
) -> Report:
    """Times everything.

    Args:
        config: of the model to make.
        card: what to time with.
        head_bits: 4 or 8.
        device: where the model runs.
        dtype: of hidden states.
        sizes: the rows of everything, if not the usual ones.
        on_fallback: hears why passes run without graphs.
    """
    rate = Rate(card.copy_rate(), card.empty_graph())
    figure = card.experts()
    bench = Bench(
        config,
        card,
        sizes=sizes or Sizes(),
        head_bits=head_bits,
        device=device,
        dtype=dtype,
        on_fallback=on_fallback,
    )
    forwards = bench.forwards(rate)
    loop = bench.loop(forwards[0].seconds)
    return Report(
        card=card.name,
        layers=config.num_hidden_layers,
        experts=config.num_experts,
        head_bits=head_bits,
        rate=rate,
        figure=figure,
        forwards=forwards,
        loop=loop,
        prompt=bench.prompt(),
    )


def _show(report: Report) -> None:
    rate = report.rate
    print(f"{report.card}: copies {rate.bytes_per_second / 1e9:.0f} GB/s, measured in this run")
    print(
        f"{report.layers} layers of {report.experts} experts, head of {report.head_bits} bits; "
        f"a graph of one kernel: {rate.empty_graph_seconds * 1e6:.1f} us"
    )
    print(f"{'forward':<10}{'rows':>5}{'experts':>9}{'GB':>7}{'ms':>8}{'floor ms':>10}{'ratio':>7}")
    for f in report.forwards:
        print(
            f"{f.name:<10}{f.rows:>5}{f.distinct_experts:>9.1f}{f.nbytes / 1e9:>7.2f}"
            f"{f.seconds * 1e3:>8.2f}{f.floor_seconds * 1e3:>10.2f}{f.ratio:>7.2f}"
        )
    loop, prompt = report.loop, report.prompt
    print(
        f"a pass in the loop: {loop.wall_seconds * 1e3:.2f} ms; the device: pass "
        f"{loop.pass_seconds * 1e3:.2f} ms, pick {loop.pick_seconds * 1e3:.2f} ms"
    )
    print(f"a prompt of {prompt.tokens} tokens: {prompt.seconds:.2f} s")
    for goal in report.goals():
        print(f"{goal.id:<4} {goal.says:<38}{goal.value:>10.3g}   ({goal.wanted} wanted)")


def _whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {least} to {most}")
        return int(text)

    return convert


def main(arguments: Sequence[str]) -> None:
    """Measures and prints.

    Raises:
        SystemExit: there is no GPU, kernels are interpreted, or the model does not fit.
    """
    parser = argparse.ArgumentParser(prog="clover_local.bench.gpu_pass", description=__doc__)
    add = partial(parser.add_argument, metavar="N")
    add("--layers", type=_whole(1, LAYERS), help="as many as fit if not given")
    add("--experts", type=_whole(8, EXPERTS), default=EXPERTS, help="of a layer")
    add("--head-bits", type=int, choices=(4, 8), default=8, help="4 or 8")
    add("--repeats", type=_whole(1, 100), default=20, help="of each forward")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU, which this bench needs")
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set, so kernels are not compiled: unset it")
    free, _ = torch.cuda.mem_get_info()
    layers = options.layers or fitting_layers(
        free, experts=options.experts, head_bits=options.head_bits
    )
    if not layers:
        raise SystemExit(
            f"not even {PATTERN} layers fit {free >> 20} MiB of free memory: pass fewer --experts"
        )
    report = measure(
        real_layers(layers=layers, experts=options.experts, vocabulary=VOCABULARY, context=CONTEXT),
        CudaCard(repeats=options.repeats),
        head_bits=options.head_bits,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        on_fallback=lambda line: print(line, file=sys.stderr),
    )
    if options.json:
        goals = [asdict(goal) for goal in report.goals()]
        print(json.dumps({**asdict(report), "goals": goals}, indent=2))
    else:
        _show(report)


if __name__ == "__main__":
    main(sys.argv[1:])
