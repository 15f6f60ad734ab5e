"""Files that someone else made, and answers of models."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from clover_local.decoding.settings import resolve
from clover_local.gguf.container import MetaValue, read_file
from clover_local.gguf.types import TYPES, TensorType
from clover_local.gguf.write import PlannedTensor, lay_out
from clover_local.session import load, open_model

Bytes = NDArray[np.uint8]


class Edited:
    """A GGUF file in memory, to be changed and written elsewhere."""

    def __init__(self, path: Path) -> None:
        file = read_file(path)
        content = path.read_bytes()
        self.metadata: dict[str, MetaValue] = dict(file.metadata)
        self.tensors: dict[str, tuple[TensorType, tuple[int, ...], bytes]] = {
            tensor.name: (
                tensor.type,
                tensor.shape,
                content[tensor.start : tensor.start + tensor.nbytes],
            )
            for tensor in file.tensors
        }

    def floats(self, name: str) -> NDArray[np.float32]:
        """The numbers of an F32 tensor."""
        kind, shape, data = self.tensors[name]
        assert kind.name == "F32"
        return np.frombuffer(data, "<f4").reshape(shape)

    def put(self, name: str, array: NDArray[np.float32]) -> None:
        """An F32 tensor in place of what was there."""
        data = np.ascontiguousarray(array, "<f4").tobytes()
        self.tensors[name] = (TYPES["F32"], array.shape, data)

    def write(self, path: Path) -> Path:
        """Writes the file."""
        planned = [
            PlannedTensor(name, kind, shape) for name, (kind, shape, _) in self.tensors.items()
        ]
        layout = lay_out(self.metadata, planned)
        content = bytearray(layout.nbytes)
        content[: len(layout.header)] = layout.header
        for start, (_, _, data) in zip(layout.starts, self.tensors.values(), strict=True):
            content[start : start + len(data)] = data
        path.write_bytes(content)
        return path


Answer = Callable[..., list[int]]


@pytest.fixture(scope="session")
def answer() -> Answer:
    """The tokens that a model answers to a prompt."""

    def run(
        model: str, prompt: list[int], *, mode: str, settings: Mapping[str, object] | None = None
    ) -> list[int]:
        opened = open_model(model)
        given = {"mode": mode, "max_new_tokens": 40, **(settings or {})}
        session = load(
            opened,
            resolve(opened.config, opened.generation, given).settings,
            context=200,
            device="cpu",
        )
        list(session.generator.run(prompt))
        assert session.generator.result is not None
        return list(session.generator.result.token_ids)

    return run


@pytest.fixture(scope="session")
def golden_gguf(
    golden_folder: Path, tmp_path_factory: pytest.TempPathFactory, export_to: Callable[..., Path]
) -> Path:
    """The golden model as F32 with diffusion parameters, to be read only."""
    return export_to(str(golden_folder), tmp_path_factory.mktemp("gguf") / "golden.gguf")


@pytest.fixture(scope="session")
def golden_ar(
    golden_folder: Path, tmp_path_factory: pytest.TempPathFactory, export_to: Callable[..., Path]
) -> Path:
    """The same as somebody else has it: without, to be read only."""
    path = export_to(
        str(golden_folder), tmp_path_factory.mktemp("gguf") / "theirs.gguf", diffusion="none"
    )
    edited = Edited(path)
    for key in [key for key in edited.metadata if key.startswith("clover.")]:
        del edited.metadata[key]
    del edited.metadata["qwen35moe.attention.recurrent_layers"]
    del edited.metadata["tokenizer.ggml.mask_token_id"]
    path.unlink()
    return edited.write(path)
