"""From a model's name to a generator that is ready: the one place that puts the parts together.

Two steps, because a wrong name, config, header, template or flag should be refused before torch and
69 GB of weights are loaded: `open_model` needs no torch, `load` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from clover_local.gguf.load.opened import open_gguf
from clover_local.hub import locate
from clover_local.placement import (
    DEVICES,
    DTYPES,
    MemoryOptions,
    Placement,
    check_context,
    place,
)
from clover_local.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from clover_local.cache import SequenceState
    from clover_local.decoding.pick import Picker
    from clover_local.generate import Generator
    from clover_local.model.clover import Clover

FINGERPRINT_BYTES = 4096  # of each tensor
NOTHING_GIVEN = MemoryOptions()


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
    placement: Placement

    @property
    def context(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.placement.context

    def memory_gap(self) -> str | None:
        """What to say of tensors that take more or less than was planned; None: nothing."""
        from clover_local.counted import counted_bytes, gap_line

        plan = self.placement.plan
        if plan is None:
            return None
        return gap_line(plan, counted_bytes(self.model, self.generator.state))

    @property
    def device(self) -> str:
        """Where it runs."""
        return self.placement.device

    @property
    def dtype(self) -> str:
        """Of activations."""
        return self.placement.dtype


def open_model(name: str) -> OpenModel:
    """Finds `name` (`demo`, a folder, a .gguf file, or a hub id) and reads all but the weights.

    Raises:
        HubError, ConfigError, CheckpointError, TokenizerError: the model cannot be used; says why.
    """
    folder = locate(name)
    if folder.is_file():
        return OpenModel(name, folder, *open_gguf(folder))
    config = read_model_config(folder)
    generation = read_generation_config(folder, config)
    checkpoint = open_checkpoint(folder, config)
    checkpoint.require_fit()
    tokenizer = Tokenizer.load(folder)
    tokenizer.require_fit(config.vocab_size)
    return OpenModel(name, folder, config, generation, tokenizer, checkpoint)


def fingerprint(opened: OpenModel) -> str:
    """A hash that tells models apart: of config.json and the start of every tensor."""
    folder = opened.folder
    config = (
        (folder / "config.json").read_bytes() if folder.is_dir() else repr(opened.config).encode()
    )
    digest = hashlib.sha256(config)
    for shard in opened.checkpoint.shards:
        with shard.path.open("rb") as file:
            for tensor in shard.tensors:
                file.seek(tensor.start)
                digest.update(tensor.name.encode())
                digest.update(file.read(min(tensor.nbytes, FINGERPRINT_BYTES)))
    return digest.hexdigest()


def plan_memory(
    opened: OpenModel,
    *,
    context: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    memory: MemoryOptions = NOTHING_GIVEN,
    settings: Settings | None = None,
) -> Placement:
    """Where the parts of the model would go; nothing is loaded.

    Args:
        device: `cpu` or `cuda`; None takes cuda where there is one.
        dtype: of activations and of weights that are not packed; None takes float32 on the CPU,
            bfloat16 on cuda.
        memory: limits that the user has set.
        settings: some rules need memory of their own.

    Raises:
        SettingsError: an unknown or absent device, an unknown dtype, a context beyond the model's,
            kernels that do not exist, a model that does not fit.
    """
    if context is not None:
        check_context(context, opened.config)
    _check_choice("device", device, DEVICES)
    _check_choice("dtype", dtype, DTYPES)
    where = check_device(device)
    number = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    _check_kernels(where, number)
    return place(
        opened.checkpoint,
        opened.config,
        device=where.type,
        dtype=number,
        context=context,
        options=memory,
        pick_rows=opened.config.block_size if settings and settings.picks_blocks_in_torch else 0,
    )


def load(
    opened: OpenModel,
    settings: Settings,
    *,
    context: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    memory: MemoryOptions = NOTHING_GIVEN,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> Session:
    """Loads the weights and makes an empty state of at most `context` tokens.

    Args:
        context: see `plan_memory`, as `device`, `dtype` and `memory`.
        on_progress: called with bytes read and bytes in all.
        on_note: called with what a user should know of how passes run, now or later.

    Raises:
        SettingsError: as `plan_memory`; no room after all.
        CheckpointError: the weights cannot be read.
    """
    placement = plan_memory(
        opened, context=context, device=device, dtype=dtype, memory=memory, settings=settings
    )
    return load_placed(opened, settings, placement, on_progress=on_progress, on_note=on_note)


def load_placed(
    opened: OpenModel,
    settings: Settings,
    placement: Placement,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> Session:
    """As `load`, where the memory is planned already.

    Raises:
        SettingsError: no room after all.
        CheckpointError: the weights cannot be read.
    """
    import torch

    from clover_local.generate import Generator
    from clover_local.kernels import dispatch
    from clover_local.memory.workspace import PREFILL_ROWS
    from clover_local.model.graphs import GraphedClover

    plan, where = placement.plan, torch.device(placement.device)
    try:
        model = _model(opened, placement, on_progress=on_progress, on_note=on_note)
        state = _empty_state(model, placement)
    except torch.OutOfMemoryError:
        raise SettingsError(
            "the device has less free memory than was planned for: close what else uses it, or "
            "pass a smaller --gpu-memory",
            keys={"gpu_memory"},
        ) from None
    generator = Generator(
        GraphedClover(model, on_fallback=on_note) if where.type == "cuda" else model,
        state,
        settings,
        picker=_picker(where) if dispatch.on_gpu(model.head.norm) else None,
        prefill_rows=PREFILL_ROWS if plan is None else plan.prefill_rows,
        on_note=on_note,
    )
    return Session(opened, model, generator, placement)


def _model(
    opened: OpenModel,
    placement: Placement,
    *,
    on_progress: Callable[[int, int], None],
    on_note: Callable[[str], None],
) -> Clover:
    """The model with its weights."""
    import torch

    from clover_local.checkpoint.load import load_parameters
    from clover_local.checkpoint.parameters import EMBEDDING
    from clover_local.experts.arrange import offload
    from clover_local.experts.protocol import Experts
    from clover_local.experts.resident import ResidentExperts
    from clover_local.experts.store import ExpertStore
    from clover_local.model.clover import Clover
    from clover_local.residency.profile import load_profile

    config, plan = opened.config, placement.plan
    profile = None
    if placement.offloads and placement.options.profile is not None:
        profile = load_profile(placement.options.profile)
        profile.require_fit(config.num_hidden_layers, config.num_experts)
    device, number = torch.device(placement.device), getattr(torch, placement.dtype)
    on_host = plan is not None and plan.budget.embedding_on_host and not config.tie_word_embeddings
    loaded = load_parameters(
        opened.checkpoint,
        config,
        device=device,
        dtype=number,
        routed_experts=not placement.offloads,
        on_host=[EMBEDDING] if on_host else [],
        mapped=not placement.offloads,
        on_progress=on_progress,
    )
    experts: Experts
    if plan is not None and placement.offloads:
        experts = offload(
            ExpertStore(opened.checkpoint, config, device=device, dtype=number),
            plan,
            device=device,
            policy=placement.policy,
            profile=profile,
            on_progress=on_progress,
            on_note=on_note,
        )
    else:
        layers = list(loaded.experts)
        loaded = replace(loaded, experts=())  # each layer's experts are freed once taken over
        experts = ResidentExperts(layers.pop(0) for _ in range(config.num_hidden_layers))
    return Clover(
        config,
        loaded.parameters,
        experts=experts,
        device=device,
        dtype=number,
        embedding_on_host=on_host,
    )


def _empty_state(model: Clover, placement: Placement) -> SequenceState:
    """A state in which nothing is committed; where memory is planned, all of it is allocated."""
    from clover_local.cache import FIRST_ROWS, SequenceState

    is_planned = placement.plan is not None
    state = SequenceState(
        model.config,
        context=placement.context,
        device=model.device,
        dtype=model.dtype,
        first_rows=placement.context if is_planned else FIRST_ROWS,
    )
    if is_planned:
        state.reserve(1)
        model.prepare(state)
    return state


def _picker(device: torch.device) -> Picker:
    """Picks where the logits are; loads Triton."""
    from clover_local.decoding.device_pick import DevicePicker

    return DevicePicker(device)


def check_device(device: str | None) -> torch.device:
    """The device to use: as given, or cuda where there is one.

    Raises:
        SettingsError: an unknown or absent device.
    """
    _check_choice("device", device, DEVICES)

    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise SettingsError(
            "--device cuda: torch sees no CUDA device here: use --device cpu", keys={"device"}
        )
    return torch.device(device or ("cuda" if available else "cpu"))


def _check_kernels(device: torch.device, dtype: str) -> None:
    import torch

    from clover_local.kernels import dispatch

    try:
        dispatch.check_choice(device, getattr(torch, dtype))
    except ValueError as error:  # the environment is the user's, so this is no wrong call
        raise SettingsError(str(error)) from None


def _check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise SettingsError(f"--{name} {value} is unknown: use {' or '.join(choices)}", keys={name})
