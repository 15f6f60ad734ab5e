"""What a result takes over from its source besides weights: config, tokenizer, controls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover_local.files import read_json_object
from clover_local.gguf.load.describe import config_values, description
from clover_local.quant.pipeline.source import CONFIG_NAME, PlainSource, Source

COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def description_files(source: Source) -> list[Path]:
    """The files that say it; none where a .gguf file says all."""
    return [] if source.folder.is_file() else [source.folder / CONFIG_NAME, *_copied(source)]


def config_json(source: Source) -> dict[str, Any]:
    """The source's config.json; of a .gguf file, what it would be."""
    if source.folder.is_file():
        return config_values(source.config)
    return read_json_object(source.folder / CONFIG_NAME)


def copied(source: Source) -> Mapping[str, bytes]:
    """The other files that the result has as well, by name."""
    if isinstance(source, PlainSource) and source.folder.is_file():
        return description(source.opened.generation, source.tokenizer)
    return {path.name: path.read_bytes() for path in _copied(source)}


def _copied(source: Source) -> list[Path]:
    folder = source.folder
    return sorted({path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()})
