"""A config and the files beside the weights, written and read again."""

from dataclasses import replace
from pathlib import Path

import pytest

from clover_local.config import (
    ModelConfig,
    parse_generation_config,
    parse_model_config,
    read_generation_config,
    read_model_config,
)
from clover_local.files import read_json_object
from clover_local.gguf.load.describe import config_values, description
from clover_local.hub import locate
from clover_local.tokenizer import Tokenizer


@pytest.mark.parametrize("model", ["demo", "golden", "odd", "real"])
def test_parsing_what_is_written_gives_the_config_again(
    model: str, golden_folder: Path, odd_config: ModelConfig, real_config: ModelConfig
) -> None:
    config = {
        "demo": read_model_config(locate("demo")),
        "golden": read_model_config(golden_folder),
        "odd": odd_config,
        "real": real_config,
    }[model]
    again = parse_model_config(config_values(config), "again")
    assert again == replace(config, unknown_keys=again.unknown_keys)


def test_the_files_are_read_as_they_were(tmp_path: Path) -> None:
    folder = locate("demo")
    config = read_model_config(folder)
    generation, tokenizer = read_generation_config(folder, config), Tokenizer.load(folder)
    for name, content in description(generation, tokenizer).items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "generation_config.json"
    assert parse_generation_config(read_json_object(path), config, "x") == generation
    again = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert again.render(messages) == tokenizer.render(messages)
    assert again.special_tokens == tokenizer.special_tokens
    assert again.encode("Hello <|im_end|>") == tokenizer.encode("Hello <|im_end|>")
