"""From the path of a .gguf file to all that a model is but its weights."""

from pathlib import Path

import tokenizers

from clover_local.checkpoint.placements import Checkpoint
from clover_local.config import GenerationConfig, ModelConfig
from clover_local.errors import CheckpointError
from clover_local.gguf.container import GgufFile
from clover_local.gguf.diffusion import (
    Floats,
    find_sidecar,
    has_arrays,
    read_sidecar,
    require_same_numbers,
    require_same_sizes,
)
from clover_local.gguf.load.config import read_config
from clover_local.gguf.load.placements import match_tensors
from clover_local.gguf.splits import GgufModel, read_gguf
from clover_local.gguf.values import Values
from clover_local.gguf.vocabulary import SPECIAL_IDS, TEMPLATE, TOKENS, tokenizer_json
from clover_local.tokenizer import Tokenizer


def open_gguf(path: Path) -> tuple[ModelConfig, GenerationConfig, Tokenizer, Checkpoint]:
    """Reads all but the weights of a .gguf file, of the first of several, and of its sidecar.

    Raises:
        CheckpointError, ConfigError, TokenizerError: the model cannot be used; says why.
    """
    model, diffusion = read_files(path)
    config, generation, checkpoint = match(model, diffusion)
    checkpoint.require_fit()
    require_own_sidecar(model, diffusion, config, checkpoint)
    tokenizer = read_tokenizer(model)
    tokenizer.require_fit(config.vocab_size)
    return config, generation, tokenizer, checkpoint


def read_files(path: Path) -> tuple[GgufModel, GgufFile | None]:
    """A model's headers, and the file that has its diffusion parameters."""
    model = read_gguf(path)
    if has_arrays(model.metadata):
        return model, model.files[0]
    sidecar = find_sidecar(path)
    return model, None if sidecar is None else read_sidecar(sidecar)


def match(
    model: GgufModel, diffusion: GgufFile | None
) -> tuple[ModelConfig, GenerationConfig, Checkpoint]:
    """The configs, and the tensors matched with them; what does not fit is in its `problems`."""
    metadata, tensors, source = model.metadata, model.tensors, str(model.path)
    config, generation = read_config(metadata, tensors, controls=metadata, source=source)
    if diffusion is not None and diffusion.path != model.path:
        require_same_sizes(diffusion, config, model=model.path)
        controls = diffusion.metadata
        config, generation = read_config(metadata, tensors, controls=controls, source=source)
    return config, generation, match_tensors(model, config, diffusion=diffusion)


def require_own_sidecar(
    model: GgufModel, diffusion: GgufFile | None, config: ModelConfig, checkpoint: Checkpoint
) -> None:
    """Raises CheckpointError where the sidecar was made for another model."""
    if diffusion is None or diffusion.path == model.path:
        return

    from clover_local.checkpoint.read import read_weight  # late: it needs torch
    from clover_local.kernels.packed import PackedWeight

    def read(name: str) -> Floats:
        (part,) = checkpoint.parts[name, None]
        weight = read_weight(part)
        plain = weight.dequantize() if isinstance(weight, PackedWeight) else weight
        numbers: Floats = plain.float().numpy()
        return numbers

    require_same_numbers(diffusion, config, read, model=model.path)


def read_tokenizer(model: GgufModel) -> Tokenizer:
    """The tokenizer and the chat template in a file.

    Raises:
        CheckpointError: none, or one that cannot be used.
    """
    source = str(model.path)
    text = tokenizer_json(model.metadata, source)
    try:
        encoder = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing more specific
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source}: its tokenizer is damaged ({reason}): download it again"
        ) from None
    values = Values(model.metadata, source)
    tokens = values.texts(TOKENS)
    special = {
        name: tokens[values.integer(key)]
        for name, key in SPECIAL_IDS.items()
        if key in values and 0 <= values.integer(key) < len(tokens)
    }
    template = {"default": values.text(TEMPLATE)} if TEMPLATE in values else {}
    return Tokenizer(encoder, source=model.path, templates=template, special_tokens=special)
