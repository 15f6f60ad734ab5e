"""Times the kernels that read weights at the real model's shapes, beside what the card can copy.

    python -m clover_local.kernels.gpu.bench [--json] [--repeats N]
    python -m clover_local.kernels.gpu.bench --count

Each figure is the median over replays of a CUDA graph that holds one call for each of several
copies of the weights, so that no launch from the host is timed and the second-level cache is cold.
`--count` needs no GPU: it counts, from tile lists, the bytes that a pass reads. Whole passes are
timed by `clover_local.bench.gpu_pass`, their launches counted by `clover_local.bench.launches`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from clover_local.kernels.gpu.experts.int4_experts import expert_results
from clover_local.kernels.gpu.experts.plain_wna16 import plain_wna16
from clover_local.kernels.gpu.experts.record import (
    ExpertSlots,
    MatrixFormat,
    RecordLayout,
    record_layout,
)
from clover_local.kernels.gpu.experts.shared import every_row, shared_expert
from clover_local.kernels.gpu.linear import float32_linear
from clover_local.kernels.gpu.linear.packed_linear import (
    CONFIGS,
    choose,
    packed_linear,
    split_workspace,
)
from clover_local.kernels.gpu.route import TILE_ROWS, SortedRouting, route_sorted
from clover_local.kernels.packed import PackedWeight

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 40, 256, 8, 2048, 512
GROUPS = {4: 128, 8: 64}
"""Columns that share a scale, by bits, as `quantize` makes them."""
ROWS = (1, 8, 16, 32, 64, 256)
USED = ((1, 8), (16, 49), (32, 70), (32, 100), (32, 163))
"""Rows, and distinct experts that they use: an AR token, a draft, three passes."""
PASS = (32, 70)
COPIED_BYTES = 1 << 30
COLD_BYTES = 1 << 28
"""Weights in turn: several times what a second-level cache holds."""
SLOTS = 512


@dataclass(frozen=True)
class Map:
    """A linear map of the real model, and how many layers have it."""

    name: str
    bits: int
    features: int
    columns: int
    layers: int

    @property
    def nbytes(self) -> int:
        """Of one layer, scales included."""
        scales = 2 * self.features * (self.columns // GROUPS[self.bits])
        return self.features * self.columns * self.bits // 8 + scales


MAPS = (
    Map("GDN in", 8, 12352, 2048, 30),
    Map("GDN out", 8, 2048, 4096, 30),
    Map("attention q, k, v", 8, 9216, 2048, 10),
    Map("attention out", 8, 2048, 4096, 10),
    Map("lm_head", 4, 248320, 2048, 1),
)


@dataclass(frozen=True)
class Figure:
    """One kernel at one shape."""

    name: str
    rows: int
    experts: int | None  # distinct ones in use
    seconds: float
    nbytes: int  # that have to be read and written
    plain_seconds: float | None  # the straightforward kernel on the same data

    @property
    def bytes_per_second(self) -> float:
        """The rate at which the bytes went."""
        return self.nbytes / self.seconds


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    card: str
    copy_bytes_per_second: float
    one_kernel_graph_seconds: float
    figures: tuple[Figure, ...]

    def figure_of_a_pass(self) -> Figure:
        """The experts of a typical pass: what the two goals are about."""
        return next(f for f in self.figures if (f.rows, f.experts) == PASS)


@dataclass(frozen=True)
class Counted:
    """Bytes of weights that the kernels of a pass read, and the fewest that would do."""

    rows: int
    experts: int
    tiles: int  # of one layer
    nbytes: int
    least: int


def real_layout() -> RecordLayout:
    """The record of the real model's experts."""
    matrix = MatrixFormat(4, GROUPS[4], torch.bfloat16, False)
    return record_layout(HIDDEN, INNER, gate_up=matrix, down=matrix)


def shared_layout() -> RecordLayout:
    """The record of the real model's shared expert."""
    matrix = MatrixFormat(8, GROUPS[8], torch.bfloat16, False)
    return record_layout(HIDDEN, INNER, gate_up=matrix, down=matrix)


def logits_for(
    rows: int, distinct: int, *, experts: int = EXPERTS, top_k: int = TOP_K, seed: int = 0
) -> Tensor:
    """Router logits [rows, experts] that make rows use `distinct` experts, some far more often.

    Raises:
        ValueError: so many cannot be used.
    """
    if not top_k <= distinct <= min(experts, rows * top_k):
        raise ValueError(f"{rows} rows of {top_k} choices cannot use {distinct} of {experts}")
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(experts, generator=generator)[:distinct]
    popular = 1.0 / torch.arange(1, distinct + 1)
    logits = torch.full((rows, experts), -100.0)
    for row in range(rows):
        if row * top_k < distinct:  # the first rows see to it that each is used
            chosen = used[(row * top_k + torch.arange(top_k)) % distinct]
        else:
            chosen = used[torch.multinomial(popular, top_k, generator=generator)]
        logits[row, chosen] = torch.rand(top_k, generator=generator)
    return logits


def count_tiles(expert_ids: Tensor, *, experts: int, tile_rows: int) -> int:
    """Tiles of a routing: each reads its expert's record once."""
    rows = torch.bincount(expert_ids.flatten().cpu(), minlength=experts)
    return int(((rows + tile_rows - 1) // tile_rows).sum())


def count_pass(rows: int, distinct: int) -> Counted:
    """Counts what a pass of the real model reads: experts by tiles, other weights by row tiles."""
    expert_ids = logits_for(rows, distinct).topk(TOP_K).indices
    tiles = count_tiles(expert_ids, experts=EXPERTS, tile_rows=TILE_ROWS)
    record, shared = LAYERS * real_layout().nbytes, LAYERS * shared_layout().nbytes
    router = LAYERS * (EXPERTS + 1) * HIDDEN * 4
    router_rows = next(c.block_m for c in float32_linear.CONFIGS if rows <= c.up_to_rows)
    nbytes = tiles * record + triton.cdiv(rows, TILE_ROWS) * shared
    nbytes += triton.cdiv(rows, router_rows) * router
    least = distinct * record + shared + router
    for linear in MAPS:
        config = choose(bits=linear.bits, rows=rows, features=linear.features, minimum=False)
        weight = linear.layers * linear.nbytes
        nbytes += triton.cdiv(rows, config.block_m) * weight
        least += weight
    return Counted(rows, distinct, tiles, nbytes, least)


def graph_seconds(calls: Sequence[Callable[[], object]], *, repeats: int) -> float:
    """Seconds of one call: the median over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats + 2):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / len(calls))
    return statistics.median(times[2:])


def copy_rate(*, repeats: int) -> float:
    """Bytes a second that the card reads and writes when it copies."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / graph_seconds([partial(target.copy_, source)], repeats=repeats)


def random_weight(linear: Map, *, device: str) -> PackedWeight:
    """A weight of this shape."""
    words, group = linear.columns * linear.bits // 32, GROUPS[linear.bits]
    data = torch.randint(-(1 << 31), 1 << 31, (linear.features, words), device=device)
    shape = (linear.features, linear.columns // group)
    scale = torch.full(shape, 0.01, dtype=torch.bfloat16, device=device)
    return PackedWeight(data.to(torch.int32), scale, None, linear.bits, group)


def random_records(slots: int, layout: RecordLayout, *, device: str) -> Tensor:
    """Records [slots, nbytes] with scales of about 0.01."""
    records = torch.randint(0, 256, (slots, layout.nbytes), dtype=torch.uint8, device=device)
    records[:, layout.gate_scale : layout.down_packed] = 0x3C
    records[:, layout.down_scale :] = 0x3C
    return records


def linear_figure(linear: Map, rows: int, *, repeats: int) -> Figure:
    """Times one linear map."""
    first = random_weight(linear, device="cuda")
    copies = max(2, COLD_BYTES // first.nbytes)
    weights = [first, *(random_weight(linear, device="cuda") for _ in range(copies - 1))]
    x = torch.randn(rows, linear.columns, device="cuda", dtype=torch.bfloat16)
    workspace = split_workspace(CONFIGS, rows=rows, features=linear.features, device="cuda")
    calls = [partial(packed_linear, x, weight, workspace=workspace) for weight in weights]
    return Figure(
        name=f"INT{linear.bits} {linear.name}",
        rows=rows,
        experts=None,
        seconds=graph_seconds(calls, repeats=repeats),
        nbytes=first.nbytes + x.nbytes + 2 * rows * linear.features,
        plain_seconds=None,
    )


def shared_figure(rows: int, *, repeats: int) -> Figure:
    """Times the shared expert of a layer."""
    layout = shared_layout()
    records = random_records(max(2, COLD_BYTES // layout.nbytes), layout, device="cuda")
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    first, every = torch.zeros(1, dtype=torch.int32, device="cuda"), every_row(rows, device="cuda")
    calls = [
        partial(shared_expert, x, slots=ExpertSlots(record[None], layout, first), every=every)
        for record in records
    ]
    return Figure(
        name="INT8 shared expert",
        rows=rows,
        experts=None,
        seconds=graph_seconds(calls, repeats=repeats),
        nbytes=layout.nbytes + x.nbytes + 4 * rows * HIDDEN,
        plain_seconds=None,
    )


@dataclass(frozen=True, eq=False)
class ExpertCalls:
    """Calls on the same rows and experts, one for each place where the experts may lie."""

    routing: SortedRouting
    ours: tuple[Callable[[], object], ...]
    plain: tuple[Callable[[], object], ...]


def expert_calls(
    records: Tensor, layout: RecordLayout, *, logits: Tensor, top_k: int
) -> ExpertCalls:
    """Our kernels, and the plain one without activation and weighting."""
    routing = route_sorted(logits.to(records.device), top_k=top_k)
    used = routing.routing.expert_ids.unique()
    experts = logits.shape[1]
    dtype = torch.float32 if records.device.type == "cpu" else torch.bfloat16
    x = torch.randn(len(logits), layout.hidden, device=records.device, dtype=dtype)
    inner = torch.randn(len(logits) * top_k, layout.inner, device=records.device, dtype=dtype)
    shape = (len(logits), top_k, layout.hidden)
    results = torch.empty(shape, dtype=torch.float32, device=records.device)
    places = []
    for turn in range(len(records) // len(used)):
        slots = torch.full((experts,), -1, dtype=torch.int32, device=records.device)
        slots[used] = turn * len(used) + torch.arange(len(used), device=slots.device).int()
        places.append(ExpertSlots(records, layout, slots))

    def plain(slots: ExpertSlots) -> Tensor:
        for matrix in ("gate", "up"):
            plain_wna16(x, routing, experts=slots, matrix=matrix)
        return plain_wna16(inner, routing, experts=slots, matrix="down")

    return ExpertCalls(
        routing,
        tuple(partial(expert_results, x, routing, slots=s, results=results) for s in places),
        tuple(partial(plain, slots) for slots in places),
    )


def one_kernel_graph_seconds(*, repeats: int) -> float:
    """Seconds of a graph that does next to nothing."""
    return graph_seconds([torch.zeros(1, device="cuda").zero_], repeats=repeats)


def expert_figures(used: Sequence[tuple[int, int]], *, repeats: int) -> list[Figure]:
    """Times a layer's experts for each pair of rows and distinct experts, ours and plain."""
    layout, figures = real_layout(), []
    records = random_records(SLOTS, layout, device="cuda")
    for rows, distinct in used:
        logits = logits_for(rows, distinct)
        calls = expert_calls(records, layout, logits=logits, top_k=TOP_K)
        figures.append(
            Figure(
                name="INT4 experts",
                rows=rows,
                experts=distinct,
                seconds=graph_seconds(calls.ours, repeats=repeats),
                nbytes=distinct * layout.nbytes,
                plain_seconds=graph_seconds(calls.plain, repeats=repeats),
            )
        )
    return figures


def measure(*, repeats: int) -> Report:
    """Times everything on the current card."""
    rate = copy_rate(repeats=repeats)
    empty = one_kernel_graph_seconds(repeats=repeats)
    figures = [linear_figure(linear, rows, repeats=repeats) for linear in MAPS for rows in ROWS]
    figures += [shared_figure(rows, repeats=repeats) for rows in ROWS]
    figures += expert_figures(USED, repeats=repeats)
    return Report(torch.cuda.get_device_name(), rate, empty, tuple(figures))


def _show(report: Report) -> None:
    rate = report.copy_bytes_per_second
    print(f"{report.card}: copies {rate / 1e9:.0f} GB/s (read and written), measured in this run")
    print(f"a graph of one kernel: {report.one_kernel_graph_seconds * 1e6:.1f} us")
    heads = f"{'us':>9}{'MB':>8}{'GB/s':>7}{'of copy':>9}{'plain':>7}"
    print(f"{'kernel':<24}{'rows':>5}{'experts':>9}{heads}")
    for f in report.figures:
        plain = "" if f.plain_seconds is None else f"{f.plain_seconds / f.seconds:.2f}x"
        print(
            f"{f.name:<24}{f.rows:>5}{f.experts or '':>9}{f.seconds * 1e6:>9.1f}"
            f"{f.nbytes / 1e6:>8.1f}{f.bytes_per_second / 1e9:>7.0f}"
            f"{f.bytes_per_second / rate:>9.2f}{plain:>7}"
        )
    goal = report.figure_of_a_pass()
    print(f"experts' bytes by copy rate (0.85 wanted): {goal.bytes_per_second / rate:.2f}")
    print(f"plain kernel's time by ours (2 wanted): {(goal.plain_seconds or 0) / goal.seconds:.2f}")


def _show_counts() -> None:
    print(f"{'rows':>5}{'experts':>9}{'tiles':>7}{'GB read':>9}{'least':>7}{'ratio':>7}")
    for rows, distinct in USED:
        c = count_pass(rows, distinct)
        print(
            f"{c.rows:>5}{c.experts:>9}{c.tiles:>7}{c.nbytes / 1e9:>9.2f}{c.least / 1e9:>7.2f}"
            f"{c.nbytes / c.least:>7.3f}"
        )


def main(arguments: Sequence[str]) -> None:
    """Measures and prints.

    Raises:
        SystemExit: there is no GPU, or kernels are interpreted.
    """
    parser = argparse.ArgumentParser(prog="clover_local.kernels.gpu.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph")
    parser.add_argument("--count", action="store_true", help="count bytes of a pass; no GPU needed")
    options = parser.parse_args(arguments)
    if options.count:
        _show_counts()
        return
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU, which the bench needs: only --count works here")
    if triton.knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set, so kernels are not compiled: unset it")
    report = measure(repeats=options.repeats)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _show(report)


if __name__ == "__main__":
    main(sys.argv[1:])
