"""From a model's name to a generator that is ready: the one place that puts the parts together.

Two steps, because a wrong name, config, header, template or flag should be refused before torch and
69 GB of weights are loaded: `open_model` needs no torch, `load` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.checkpoint.placements import Checkpoint, open_checkpoint
from clover_local.config import (
    GenerationConfig,
    ModelConfig,
    read_generation_config,
    read_model_config,
)
from clover_local.decoding.settings import Settings
from clover_local.errors import SettingsError
from clover_local.hub import locate
from clover_local.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from clover_local.decoding.pick import Picker
    from clover_local.generate import Generator
    from clover_local.model.clover import Clover

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
FINGERPRINT_BYTES = 4096  # of each tensor


@dataclass(frozen=True)
class OpenModel:
    """A model whose files are found and checked, without its weights."""

    name: str
    folder: Path
    config: ModelConfig
    generation: GenerationConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Session:
    """A loaded model with the state of one sequence and the generator that advances it."""

    opened: OpenModel
    model: Clover
    generator: Generator
    context: int
    device: str
    dtype: str


def open_model(name: str) -> OpenModel:
    """Finds `name` (`demo`, a folder, or a hub id) and reads all but the weights.

    Raises:
        HubError, ConfigError, CheckpointError, TokenizerError: the model cannot be used; says why.
    """
    folder = locate(name)
    config = read_model_config(folder)
    generation = read_generation_config(folder, config)
    checkpoint = open_checkpoint(folder, config)
    checkpoint.require_fit()
    tokenizer = Tokenizer.load(folder)
    tokenizer.require_fit(config.vocab_size)
    return OpenModel(name, folder, config, generation, tokenizer, checkpoint)


def fingerprint(opened: OpenModel) -> str:
    """A hash that tells models apart: of config.json and the start of every tensor."""
    digest = hashlib.sha256((opened.folder / "config.json").read_bytes())
    for shard in opened.checkpoint.shards:
        with shard.path.open("rb") as file:
            for tensor in shard.tensors:
                file.seek(tensor.start)
                digest.update(tensor.name.encode())
                digest.update(file.read(min(tensor.nbytes, FINGERPRINT_BYTES)))
    return digest.hexdigest()


def load(
    opened: OpenModel,
    settings: Settings,
    *,
    context: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> Session:
    """Loads the weights and makes an empty state of at most `context` tokens.

    Args:
        device: `cpu` or `cuda`; None takes cuda where there is one.
        dtype: of activations and of weights that are not packed; None takes float32 on the CPU,
            bfloat16 on cuda.
        on_progress: called with bytes read and bytes in all.
        on_note: called with what a user should know of how passes run, now or later.

    Raises:
        SettingsError: an unknown or absent device, an unknown dtype, a context beyond the model's,
            kernels that do not exist.
        CheckpointError: the weights cannot be read.
    """
    context = check_context(context, opened.config)
    _check_choice("device", device, DEVICES)
    _check_choice("dtype", dtype, DTYPES)

    import torch

    from clover_local.cache import SequenceState
    from clover_local.checkpoint.load import load_parameters
    from clover_local.experts.resident import ResidentExperts
    from clover_local.generate import Generator
    from clover_local.kernels import dispatch
    from clover_local.model.clover import Clover
    from clover_local.model.graphs import GraphedClover

    place = check_device(device)
    dtype = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    number: torch.dtype = getattr(torch, dtype)
    try:
        dispatch.check_choice(place, number)
    except ValueError as error:  # the environment is the user's, so this is no wrong call
        raise SettingsError(str(error)) from None
    loaded = load_parameters(
        opened.checkpoint, opened.config, device=place, dtype=number, on_progress=on_progress
    )
    parameters, layers = loaded.parameters, list(loaded.experts)
    del loaded  # so that each layer's experts are freed as soon as they are taken over
    experts = ResidentExperts(layers.pop(0) for _ in range(opened.config.num_hidden_layers))
    model = Clover(opened.config, parameters, experts=experts, device=place, dtype=number)
    state = SequenceState(opened.config, context=context, device=place, dtype=number)
    generator = Generator(
        GraphedClover(model, on_fallback=on_note) if place.type == "cuda" else model,
        state,
        settings,
        picker=_picker(place) if dispatch.on_gpu(model.embedding) else None,
    )
    return Session(opened, model, generator, context, str(place), dtype)


def _picker(device: torch.device) -> Picker:
    """Picks where the logits are; loads Triton."""
    from clover_local.decoding.device_pick import DevicePicker

    return DevicePicker(device)


def check_context(context: int | None, config: ModelConfig) -> int:
    """The context to use: as given, or all that the model can.

    Raises:
        SettingsError: more than the model can.
    """
    most = config.max_position_embeddings
    if context is not None and context > most:
        raise SettingsError(f"--context {context} exceeds the model's {most}: pass at most that")
    return most if context is None else context


def check_device(device: str | None) -> torch.device:
    """The device to use: as given, or cuda where there is one.

    Raises:
        SettingsError: an unknown or absent device.
    """
    _check_choice("device", device, DEVICES)

    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise SettingsError("--device cuda: torch sees no CUDA device here: use --device cpu")
    return torch.device(device or ("cuda" if available else "cpu"))


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise SettingsError(f"--{name} {value} is unknown: use {' or '.join(choices)}")
