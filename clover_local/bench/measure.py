"""How long a forward takes beside the least it could take on this machine, measured in one run.

The floors (`floor.py`) rest on two rates: that at which this machine reads a large tensor, and that
of a 2048-cube product, by torch in float32 or by the kernel for packed weights, whichever is
faster. Both are measured in the same run, between the forwards, and two models are timed in turns,
so that a ratio holds while the machine's speed drifts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from clover_local.bench.floor import Operator, Rates, operators
from clover_local.bench.models import expert_weights, random_packed, trunk, widths
from clover_local.cache import SequenceState
from clover_local.kernels import dispatch
from clover_local.model.clover import Clover
from clover_local.model.output import PassOutput

CUBE = 2048  # of the reference product
READ_BYTES = 1 << 29  # of the tensor whose read rate counts
PREFIX_ROWS = 256  # committed before the forwards
COMMIT_ROWS = 32
PROMPT_ROWS = 512
KINDS = ("pass", "commit", "AR token", "prompt")
PROMPT_REPEATS = 3  # at most: a prompt takes longer than all other forwards together


@dataclass(frozen=True)
class Forward:
    """One kind of forward: median time, floor, and what the floor is made of."""

    name: str
    rows: int
    distinct_experts: float  # a layer
    milliseconds: float
    floor_milliseconds: float
    operators: tuple[Operator, ...]

    @property
    def ratio(self) -> float:
        """Time by floor; 1 is perfect."""
        return self.milliseconds / self.floor_milliseconds


@dataclass(frozen=True)
class Subject:
    """A model to time."""

    name: str
    model: Clover


@dataclass(frozen=True)
class Measured:
    """The forwards of one model, and what runs its products."""

    name: str
    kernels: tuple[str, ...]
    forwards: tuple[Forward, ...]

    def to_json(self) -> dict[str, object]:
        """For `bench --json`."""
        return {
            "weights": self.name,
            "kernels": list(self.kernels),
            "forwards": [
                {
                    "name": f.name,
                    "rows": f.rows,
                    "distinct_experts_per_layer": f.distinct_experts,
                    "ms": f.milliseconds,
                    "floor_ms": f.floor_milliseconds,
                    "ratio": f.ratio,
                    "operators": [
                        {"name": o.name, "bytes": o.bytes, "flops": o.flops} for o in f.operators
                    ],
                }
                for f in self.forwards
            ],
        }


@dataclass(frozen=True)
class Report:
    """All models' forwards, and the rates that their floors rest on."""

    rates: Rates
    threads: int
    models: tuple[Measured, ...]

    def to_json(self) -> dict[str, object]:
        """For `bench --json`; rates in GB/s and GFLOP/s."""
        return {
            "read_gb_per_second": self.rates.bytes_per_second / 1e9,
            "matmul_gflop_per_second": self.rates.flops_per_second / 1e9,
            "threads": self.threads,
            "models": [model.to_json() for model in self.models],
        }


def measure(subjects: Sequence[Subject], *, repeats: int, seed: int = 0) -> Report:
    """Times the forwards of each model behind a short prefix, in turns.

    They are a preview of a block, a commit of 32 rows, an AR token, and a prompt of 512 rows; the
    last less often.

    Args:
        repeats: timed runs of each kind, after one that is not.
        seed: of the tokens.

    Raises:
        ValueError: a model whose experts are not resident.
    """
    benches = [_Bench(subject, seed=seed) for subject in subjects]
    references = _references(torch.Generator().manual_seed(seed))
    seconds: dict[str, list[float]] = {name: [] for name in references}
    for repeat in range(repeats + 1):  # the first one warms up
        for kind in KINDS:
            if kind == "prompt" and repeat > PROMPT_REPEATS:
                continue
            for bench in benches:
                bench.run(kind, keep=repeat > 0)
            for name, work in references.items():
                began = time.perf_counter()
                work()
                if repeat > 0:
                    seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    product = min(value for name, value in medians.items() if name != "read")
    rates = Rates(READ_BYTES / medians["read"], 2.0 * CUBE**3 / product)
    return Report(rates, torch.get_num_threads(), tuple(bench.result(rates) for bench in benches))


def _references(generator: torch.Generator) -> dict[str, Callable[[], object]]:
    """A large read, and a product by torch and by the kernel for packed weights."""
    big = torch.ones(READ_BYTES // 4)
    cube = torch.randn(CUBE, CUBE, generator=generator)
    packed = random_packed((CUBE, CUBE), bits=8, generator=generator)
    return {
        "read": big.sum,
        "product": partial(torch.mm, cube, cube),
        "packed product": partial(dispatch.linear, cube, packed),
    }


class _Bench:
    """One model, its state behind the prefix, and the times of its forwards."""

    def __init__(self, subject: Subject, *, seed: int) -> None:
        self._subject = subject
        model, config = subject.model, subject.model.config
        self._generator = torch.Generator().manual_seed(seed)
        self._state = SequenceState(
            config, context=config.max_position_embeddings, device=model.device, dtype=model.dtype
        )
        model.commit(self._tokens(PREFIX_ROWS), self._state)
        self._prefix = self._state.checkpoint()
        prompt = min(PROMPT_ROWS, self._state.room)
        rows = {"pass": config.block_size, "commit": COMMIT_ROWS, "AR token": 1, "prompt": prompt}
        self._rows = {kind: rows[kind] for kind in KINDS if kind != "pass" or model.can_preview}
        self._seconds: dict[str, list[float]] = {kind: [] for kind in self._rows}
        self._outputs: dict[str, PassOutput] = {}

    def run(self, kind: str, *, keep: bool) -> None:
        """Runs a forward, if the model has it, and keeps its time."""
        if kind not in self._rows:
            return
        model, ids = self._subject.model, self._tokens(self._rows[kind])
        self._state.rewind(self._prefix)
        began = time.perf_counter()
        if kind == "pass":
            self._outputs[kind] = model.preview(ids, self._state)
        else:
            self._outputs[kind] = model.commit(ids, self._state)
        if keep:
            self._seconds[kind].append(time.perf_counter() - began)

    def result(self, rates: Rates) -> Measured:
        """Medians and floors of all forwards."""
        model = self._subject.model
        forwards = tuple(
            _forward(
                model,
                kind,
                rows=rows,
                output=self._outputs[kind],
                seconds=statistics.median(self._seconds[kind]),
                rates=rates,
            )
            for kind, rows in self._rows.items()
        )
        return Measured(self._subject.name, _kernels(model), forwards)

    def _tokens(self, rows: int) -> list[int]:
        vocabulary = self._subject.model.config.vocab_size
        ids: list[int] = torch.randint(0, vocabulary, (rows,), generator=self._generator).tolist()
        return ids


def _kernels(model: Clover) -> tuple[str, ...]:
    """What runs the experts, the trunk and the head."""
    parts = {
        "experts": expert_weights(model),
        "trunk": [weight for linear in trunk(model) for weight in linear.weights],
        "head": model.head.lm_head.weights,
    }
    return tuple(
        f"{name}: {', '.join(sorted({dispatch.weight_kernel(weight) for weight in weights}))}"
        for name, weights in parts.items()
    )


def _forward(
    model: Clover, name: str, *, rows: int, output: PassOutput, seconds: float, rates: Rates
) -> Forward:
    used = [ids[ids >= 0] for ids in output.expert_ids]
    distinct = sum(len(set(ids.tolist())) for ids in used)
    parts = operators(
        model.config,
        rows=rows,
        committed=PREFIX_ROWS,
        expert_uses=sum(len(ids) for ids in used),
        distinct=distinct,
        widths=widths(model),
    )
    floor = sum(map(rates.seconds, parts))
    layers = model.config.num_hidden_layers
    return Forward(name, rows, distinct / layers, 1000 * seconds, 1000 * floor, parts)
