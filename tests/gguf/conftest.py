"""Small GGUF files for the tests of this folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from clover_local.gguf.container import MetaValue
from clover_local.gguf.types import TYPES
from clover_local.gguf.write import PlannedTensor, lay_out

WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes float32 tensors, counting up from 0, and metadata to a file."""

    def write(
        name: str = "model.gguf",
        *,
        metadata: Mapping[str, MetaValue] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> Path:
        shapes = {"a": (2, 32), "b": (5,)} if shapes is None else shapes
        planned = [PlannedTensor(key, TYPES["F32"], tuple(shape)) for key, shape in shapes.items()]
        layout = lay_out(
            {"general.architecture": "none"} if metadata is None else metadata, planned
        )
        content = bytearray(layout.nbytes)
        content[: len(layout.header)] = layout.header
        for tensor, start in zip(planned, layout.starts, strict=True):
            numbers = np.arange(tensor.nbytes // 4, dtype="<f4")
            content[start : start + tensor.nbytes] = numbers.tobytes()
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write
