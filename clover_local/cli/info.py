"""`clover-local info`: what a model is, from its config and the headers of its weight files."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.checkpoint.parameters import ParameterCount, count_parameters
from clover_local.checkpoint.placements import open_checkpoint, require_readable
from clover_local.checkpoint.summary import (
    Group,
    Summary,
    bits_per_weight,
    read_summary,
    summarize,
)
from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, QuietOpt
from clover_local.config import (
    GenerationConfig,
    ModelConfig,
    read_generation_config,
    read_model_config,
)
from clover_local.decoding.keys import SINGLE_MODES
from clover_local.errors import CheckpointError, CloverError
from clover_local.files import read_json_object
from clover_local.hub import DESCRIPTION_FILES, locate

if TYPE_CHECKING:
    from clover_local.tokenizer import Tokenizer

# Which builds run a file, by its architecture.
_LLAMA_CPP = {
    "qwen35moe": "every one that has Qwen3.5 MoE (tried: build 11549), one token at a time",
    "clover-moe": "builds from 12060 on (not tried)",
}


@dataclass(frozen=True)
class WeightFacts:
    """The weight files: bytes on disk, numbers by dtype, and the modes that they allow."""

    bytes: int
    parameters_by_dtype: dict[str, int]
    diffusion_parameters: bool
    modes: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class QuantizationFacts:
    """How a quantized model is stored: bits for each number, formats and records."""

    bits_per_weight: float
    experts_bits_per_weight: float
    summary: Summary


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer and the chat template."""

    tokens: int
    chat_template: bool
    can_think: bool


@dataclass(frozen=True)
class GgufFacts:
    """What only a .gguf file has: the name of its graph, and where the diffusion parameters lie."""

    architecture: str
    diffusion_file: str | None
    llama_cpp: str


@dataclass(frozen=True)
class ModelFacts:
    """What `info` shows, and with `--json` its keys.

    `weights` and `tokenizer` are null when they are absent, or so damaged that `problems` says why.
    `quantization` is null when nothing is packed, and there before the weights are when
    `clover-summary.json` is.
    """

    model: str
    folder: str
    architectures: tuple[str, ...]
    parameters: ParameterCount
    config: ModelConfig
    response_controls: dict[str, object]
    weight_files: int
    weights: WeightFacts | None
    quantization: QuantizationFacts | None
    has_tokenizer: bool
    tokenizer: TokenizerFacts | None
    problems: tuple[str, ...]
    gguf: GgufFacts | None = None  # null for a folder


def info(model: ModelArg, as_json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """Show what MODEL is: its shape, its weights, what it can do."""
    facts = describe(model)
    if as_json:
        console.print_json(asdict(facts))
    else:
        console.show_table(model, [*_config_rows(facts), *_file_rows(facts)])
    if facts.problems:
        raise CheckpointError("; ".join(facts.problems))


def describe(model: str) -> ModelFacts:
    """Reads config, headers and tokenizer of a model, but no weights.

    Raises:
        CheckpointError, HubError, ConfigError: no such model, or a config that cannot be used. What
            is wrong with weights and tokenizer is in `problems`.
    """
    from clover_local.tokenizer import Tokenizer  # late: `--help` need not wait for it

    folder = locate(model, files=DESCRIPTION_FILES)
    if folder.is_file():
        return _describe_gguf(model, folder)
    config = read_model_config(folder)
    generation = read_generation_config(folder, config)
    architectures = read_json_object(folder / "config.json").get("architectures")
    weight_files = sum(1 for _ in folder.glob("*.safetensors"))
    has_tokenizer = os.path.lexists(folder / "tokenizer.json")
    weights = summary = None
    problems = []
    try:
        summary = read_summary(folder)
        if weight_files and (summary is None or not summary.describes(folder)):
            checkpoint = open_checkpoint(folder, config)
            summary = summarize(checkpoint)
            weights = _weight_facts(summary, checkpoint.notes)
            checkpoint.require_fit()
        elif weight_files and summary is not None:
            require_readable(folder, config)
            weights = _weight_facts(summary)
    except CloverError as error:
        problems.append(str(error))
    tokens = None
    if has_tokenizer:
        tokens = _tokenizer_facts(partial(Tokenizer.load, folder), config, problems)
    return ModelFacts(
        model=model,
        folder=str(folder),
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        parameters=count_parameters(
            config, diffusion=weights is None or weights.diffusion_parameters
        ),
        config=config,
        response_controls=_controls(generation),
        weight_files=weight_files,
        weights=weights,
        quantization=(
            None
            if summary is None or all(group.group_size is None for group in summary.groups)
            else _quantization_facts(summary)
        ),
        has_tokenizer=has_tokenizer,
        tokenizer=tokens,
        problems=tuple(problems),
    )


def _describe_gguf(model: str, path: Path) -> ModelFacts:
    from clover_local.gguf.load import opened  # late: `--help` need not wait for numpy

    files, diffusion = opened.read_files(path)
    config, generation, checkpoint = opened.match(files, diffusion)
    summary = summarize(checkpoint)
    problems = []
    try:
        checkpoint.require_fit()
        opened.require_own_sidecar(files, diffusion, config, checkpoint)
    except CloverError as error:
        problems.append(str(error))
    tokens = _tokenizer_facts(partial(opened.read_tokenizer, files), config, problems)
    architecture = str(files.metadata["general.architecture"])
    return ModelFacts(
        model=model,
        folder=str(path.parent),
        architectures=(architecture,),
        parameters=count_parameters(config, diffusion=checkpoint.has_diffusion),
        config=config,
        response_controls=_controls(generation),
        weight_files=len(files.files),
        weights=_weight_facts(summary, checkpoint.notes),
        quantization=_quantization_facts(summary),
        has_tokenizer=True,
        tokenizer=tokens,
        problems=tuple(problems),
        gguf=GgufFacts(
            architecture,
            None if diffusion is None else str(diffusion.path),
            _LLAMA_CPP[architecture],
        ),
    )


def _weight_facts(summary: Summary, notes: tuple[str, ...] = ()) -> WeightFacts:
    numbers: Counter[str] = Counter()
    for group in summary.groups:
        numbers[group.label] += group.numbers
    return WeightFacts(
        bytes=sum(shard.bytes for shard in summary.shards),
        parameters_by_dtype=dict(numbers.most_common()),
        diffusion_parameters=bool(summary.diffusion),
        modes=SINGLE_MODES if summary.diffusion else ("ar",),
        notes=notes,
    )


def _tokenizer_facts(
    load: Callable[[], "Tokenizer"], config: ModelConfig, problems: list[str]
) -> TokenizerFacts | None:
    """What `load` gives; what is wrong with it is added to `problems`."""
    facts = None
    try:
        tokenizer = load()
        facts = TokenizerFacts(tokenizer.size, tokenizer.has_template, tokenizer.can_think)
        tokenizer.require_fit(config.vocab_size)
        tokenizer.check_templates()
    except CloverError as error:
        problems.append(str(error))
    return facts


def _quantization_facts(summary: Summary) -> QuantizationFacts:
    return QuantizationFacts(
        round(summary.bits_per_weight, 4), round(bits_per_weight(summary.experts), 4), summary
    )


def _controls(generation: GenerationConfig) -> dict[str, object]:
    controls = asdict(generation)
    del controls["given"]
    return {**controls, "stop_ids": generation.stop_ids}


def _config_rows(facts: ModelFacts) -> list[tuple[str, str]]:
    config, count = facts.config, facts.parameters
    attention = sum(map(config.is_attention, range(config.num_hidden_layers)))
    coreset = f"experts of mass {config.coreset_top_p:g}" if config.coreset_enabled else "off"
    return [
        ("folder", facts.folder),
        ("architecture", _listed(facts.architectures)),
        ("parameters", f"{_count(count.total)}, {_count(count.active)} active per token"),
        (
            "layers",
            f"{config.num_hidden_layers}: {config.num_hidden_layers - attention} Gated DeltaNet, "
            f"{attention} attention; hidden size {config.hidden_size}",
        ),
        (
            "experts",
            f"{config.num_experts} a layer, {config.num_experts_per_tok} per token + 1 shared",
        ),
        ("vocabulary", f"{config.vocab_size}"),
        ("context", f"{config.max_position_embeddings} tokens"),
        ("block", f"{config.block_size} rows, mask id {config.mask_token_id}"),
        ("threshold", f"{config.threshold:g}"),
        ("coreset", coreset),
    ]


def _file_rows(facts: ModelFacts) -> list[tuple[str, str]]:
    default = _controls(GenerationConfig())
    controls = [
        f"{key} {_listed(value) if isinstance(value, tuple) else value}"
        for key, value in facts.response_controls.items()
        if value != default[key]
    ]
    rows = [("response controls", _listed(controls))]
    weights, tokenizer = facts.weights, facts.tokenizer
    if weights is None:
        rows.append(("weights", "unreadable" if facts.weight_files else "absent"))
    else:
        dtypes = [f"{dtype} {_count(n)}" for dtype, n in weights.parameters_by_dtype.items()]
        present = "present" if weights.diffusion_parameters else "absent"
        rows += [
            ("weights", f"{_count(weights.bytes)}B in {facts.weight_files} file(s)"),
            ("dtype", _listed(dtypes)),
            ("diffusion parameters", f"{present}; modes: {_listed(weights.modes)}"),
            *(("note", note) for note in weights.notes),
        ]
    if facts.gguf is not None:
        rows.append(("diffusion parameters in", facts.gguf.diffusion_file or "no file"))
        rows.append(("llama.cpp", facts.gguf.llama_cpp))
    rows += _quantization_rows(facts.quantization)
    if tokenizer is None:
        rows.append(("tokenizer", "unreadable" if facts.has_tokenizer else "absent"))
    else:
        thinking = "with" if tokenizer.can_think else "without"
        template = f"yes, {thinking} a switch for thinking" if tokenizer.chat_template else "none"
        rows += [("tokenizer", f"{tokenizer.tokens} tokens"), ("chat template", template)]
    rows.append(("unknown config keys", _listed(facts.config.unknown_keys)))
    return rows


def _quantization_rows(facts: QuantizationFacts | None) -> list[tuple[str, str]]:
    if facts is None:
        return []
    summary = facts.summary
    sizes = sorted({size.bytes for layer in summary.records for size in layer})
    return [
        ("bits per weight", f"{facts.bits_per_weight:.2f}"),
        *((f"  {part}", _stored(groups)) for part, groups in summary.parts.items() if groups),
        ("one expert", _listed([f"{_count(size)}B" for size in sizes])),
    ]


def _stored(groups: Sequence[Group]) -> str:
    return _listed([f"{group.label} {_count(group.bytes)}B" for group in groups])


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


def _count(number: int) -> str:
    """34660000000 as `34.7 G`."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {unit}"
    return f"{number} "
