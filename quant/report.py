"""What quantizing did, layer by layer and to the whole model: `quantization_report.json`.

Errors are relative output errors: the share of a weight's output, squared and summed over the rows
that it saw in calibration, that rounding loses. What RTN rounds is the source's weight; what GPTQ
rounds is that weight corrected for what was lost before it (see `quant/drift.py`), so its error is
what rounding alone adds. Of the trunk, whose inputs are not recorded, it is the share of the weight
itself, as if all inputs were alike.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clover_local.files import Reader, as_integer, as_number, as_object, as_objects, as_text
from clover_local.quant.pipeline.manifest import MADE_FROM, Manifest
from clover_local.quant.profiles import AS_SOURCE

FORMAT = "clover-local quantization report 1"


@dataclass(frozen=True)
class TensorReport:
    """A matrix outside the routed experts. Bits 16 and no group size: as in the source."""

    name: str
    bits: int
    group_size: int | None
    error: float | None  # None: imported


@dataclass(frozen=True)
class Spread:
    """Errors of one kind of matrix over the experts of a layer."""

    median: float
    mean: float
    largest: float


@dataclass(frozen=True)
class ExpertReport:
    """One kind of matrix (`gate_proj`, ...) of all experts of a layer; no errors of an import.

    `rtn` is the error of rounding the source's weight, `method` that of the method, each against
    what it rounds.
    """

    kind: str
    bits: int
    group_size: int | None
    rtn: Spread | None = None
    method: Spread | None = None
    worst_expert: int | None = None  # by the method's error


@dataclass(frozen=True)
class DampedExpert:
    """A Hessian that needed more damping than asked for."""

    kind: str
    expert: int
    damp: float


@dataclass(frozen=True)
class LayerReport:
    """One decoder layer; `tokens` are the calibration rows of each expert, if there were any."""

    layer: int
    tensors: tuple[TensorReport, ...]
    experts: tuple[ExpertReport, ...]
    tokens: tuple[int, ...]
    few_tokens: tuple[int, ...]  # experts under the floor
    damped: tuple[DampedExpert, ...]
    dead_inputs: int  # that an expert never saw other than zero, over all experts

    @property
    def tokens_min(self) -> int | None:
        """Rows of the expert that saw the fewest."""
        return min(self.tokens) if self.tokens else None

    @property
    def tokens_median(self) -> float | None:
        """Rows of the middle expert."""
        return statistics.median(self.tokens) if self.tokens else None

    def to_json(self) -> dict[str, Any]:
        """As an object for a file."""
        return {
            **asdict(self),
            "tokens_min": self.tokens_min,
            "tokens_median": self.tokens_median,
        }


@dataclass(frozen=True)
class SizeReport:
    """Bytes of the result's weights, and of what they were made from."""

    bytes: int
    source_bytes: int
    bits_per_weight: float
    int4_bytes: int
    int4_ratio: float | None  # of the INT4 tensors' bytes to theirs in BF16


@dataclass(frozen=True)
class QuantizationReport:
    """All of it; `evaluation` is as `clover-local evaluate --json` gives it, None without one."""

    manifest: Manifest
    size: SizeReport
    outer: tuple[TensorReport, ...]
    layers: tuple[LayerReport, ...]
    evaluation: Mapping[str, Any] | None
    notes: tuple[str, ...]

    @property
    def few_tokens(self) -> int:
        """Experts under the floor, in all layers."""
        return sum(len(layer.few_tokens) for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """As an object for a file."""
        return {
            "format": FORMAT,
            MADE_FROM: self.manifest.to_json(),
            "notes": list(self.notes),
            "size": asdict(self.size),
            "experts_under_min_tokens": self.few_tokens,
            "evaluation": self.evaluation,
            "outer": [asdict(tensor) for tensor in self.outer],
            "layers": [layer.to_json() for layer in self.layers],
        }


def spread(errors: Sequence[float]) -> Spread:
    """Median, mean and largest of at least one error."""
    return Spread(statistics.median(errors), statistics.fmean(errors), max(errors))


def layer_line(report: LayerReport, *, layers: int) -> str:
    """One layer in one line, for who has no progress bar."""
    parts = [f"layer {report.layer + 1} of {layers}"]
    if report.tokens:
        parts.append(f"tokens an expert {report.tokens_min} to {max(report.tokens)}")
    parts += [_expert_words(expert) for expert in report.experts]
    return " · ".join(parts)


def _expert_words(expert: ExpertReport) -> str:
    words = expert.kind if expert.bits == AS_SOURCE else f"{expert.kind} INT{expert.bits}"
    if expert.method is None or expert.rtn is None:
        return words
    words += f" error {_percent(expert.method.median)}"
    return words if expert.rtn == expert.method else f"{words} (RTN {_percent(expert.rtn.median)})"


def table(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The layers of a report's JSON as rows, a head above."""
    rows: list[tuple[str, ...]] = [
        ("layer", "tokens min", "median", "few", "matrix", "bits", "group", "error", "RTN", "worst")
    ]
    for layer in values["layers"]:
        start = (
            str(layer["layer"]),
            _shown(layer["tokens_min"]),
            _shown(layer["tokens_median"]),
            str(len(layer["few_tokens"])),
        )
        for expert in layer["experts"]:
            method, rtn = expert["method"], expert["rtn"]
            errors = ("-", "-", "-")
            if method and rtn:
                worst = f"{_percent(method['largest'])} ({expert['worst_expert']})"
                errors = (_percent(method["median"]), _percent(rtn["median"]), worst)
            formats = (expert["kind"], str(expert["bits"]), _shown(expert["group_size"]))
            rows.append((*start, *formats, *errors))
            start = ("", "", "", "")
    return rows


def parse_layer(values: Mapping[str, Any], source: str) -> LayerReport:
    """The opposite of `LayerReport.to_json`.

    Raises:
        ConfigError: a missing or wrongly typed key; `source` names the file.
    """
    reader = Reader(source, values)
    return LayerReport(
        layer=reader.get("layer", as_integer),
        tensors=tuple(parse_tensor(item, source) for item in reader.get("tensors", as_objects)),
        experts=tuple(_parse_expert(item, source) for item in reader.get("experts", as_objects)),
        tokens=reader.get("tokens", _as_integers),
        few_tokens=reader.get("few_tokens", _as_integers),
        damped=tuple(_parse_damped(item, source) for item in reader.get("damped", as_objects)),
        dead_inputs=reader.get("dead_inputs", as_integer),
    )


def parse_tensor(values: Mapping[str, Any], source: str) -> TensorReport:
    """A `TensorReport` from its JSON."""
    reader = Reader(source, values)
    return TensorReport(
        name=reader.get("name", as_text),
        bits=reader.get("bits", as_integer),
        group_size=reader.get("group_size", as_integer, None),
        error=reader.get("error", as_number, None),
    )


def _parse_expert(values: Mapping[str, Any], source: str) -> ExpertReport:
    reader = Reader(source, values)
    return ExpertReport(
        kind=reader.get("kind", as_text),
        bits=reader.get("bits", as_integer),
        group_size=reader.get("group_size", as_integer, None),
        rtn=_parse_spread(reader.get("rtn", as_object, None), source),
        method=_parse_spread(reader.get("method", as_object, None), source),
        worst_expert=reader.get("worst_expert", as_integer, None),
    )


def _parse_spread(values: Mapping[str, Any] | None, source: str) -> Spread | None:
    if values is None:
        return None
    reader = Reader(source, values)
    return Spread(*(reader.get(key, as_number) for key in ("median", "mean", "largest")))


def _parse_damped(values: Mapping[str, Any], source: str) -> DampedExpert:
    reader = Reader(source, values)
    return DampedExpert(
        kind=reader.get("kind", as_text),
        expert=reader.get("expert", as_integer),
        damp=reader.get("damp", as_number),
    )


def _as_integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("a list of integers")
    return tuple(as_integer(item) for item in value)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
