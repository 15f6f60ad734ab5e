"""The sizes in `docs/gguf.md` are those that the code would write."""

import re
from math import prod
from pathlib import Path

import pytest

from clover_local.config import ModelConfig
from clover_local.gguf.export.mixtures import FILE_TYPES, PRESETS, mixture, tensor_type
from clover_local.gguf.tensors import named_entries
from clover_local.gguf.types import DECODED

TEXT = (Path(__file__).parents[2] / "docs" / "gguf.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*FILE_TYPES, *PRESETS])
def test_sizes_of_the_real_model_are_up_to_date(name: str, real_config: ModelConfig) -> None:
    kind, preset = (None, name) if name in PRESETS else (name, None)
    mix = mixture(kind, preset, has_imatrix=False)
    nbytes = sum(
        prod(each.shape[:-1]) * tensor_type(each, mix, real_config).row_bytes(each.shape[-1])
        for each in named_entries(real_config)
    )
    (row,) = re.findall(rf"^\| (?:\w+, )?{name}(?:, \w+)? \| ([\d,]+) \|", TEXT, re.MULTILINE)
    assert abs(int(row.replace(",", "")) - nbytes / 2**20) < 0.6


def test_every_type_that_is_read_is_listed() -> None:
    table = TEXT[TEXT.index("| type in the file |") :].split("\n\n", 1)[0]
    assert {name for name in DECODED if not re.search(rf"\b{name}\b", table)} == set()
