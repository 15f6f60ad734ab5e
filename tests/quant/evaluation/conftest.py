"""The golden model, and a copy of it that is slightly wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clover_local.quant.documents import Document, parse_documents
from clover_local.session import OpenModel, open_model

Altered = Callable[..., OpenModel]
Noisy = Callable[[float], OpenModel]

TEXT = """
=== greeting
>>> user
Hello, who are you?
>>> assistant
I am a very small model with random weights, and nothing that I say has a meaning.
=== counting
>>> user
Count.
>>> assistant
One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen.
"""


@pytest.fixture(scope="session")
def golden(golden_folder: Path) -> OpenModel:
    return replace(open_model(str(golden_folder)), name="golden")


@pytest.fixture(scope="session")
def documents() -> tuple[Document, ...]:
    return parse_documents(TEXT.encode(), source="text", kind="text")


@pytest.fixture
def altered(golden_folder: Path, model_folder: Path) -> Altered:
    """Opens a copy of the golden model whose tensors went through `change(name, tensor)`.

    The copy is written anew each time.
    """

    def make(change: Callable[[str, Tensor], Tensor | None]) -> OpenModel:
        source = load_file(golden_folder / "model.safetensors")
        changed = {name: change(name, tensor) for name, tensor in source.items()}
        kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
        save_file(kept, model_folder / "model.safetensors")
        return replace(open_model(str(model_folder)), name="altered")

    return make


@pytest.fixture
def noisy(altered: Altered) -> Noisy:
    """Opens the golden model with noise on its matrices, as a share of their spread."""

    def make(share: float) -> OpenModel:
        generator = torch.Generator().manual_seed(5)

        def add_noise(name: str, tensor: Tensor) -> Tensor:
            if tensor.dim() < 2:
                return tensor
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * share
            return tensor.float() + noise

        return altered(add_noise)

    return make
