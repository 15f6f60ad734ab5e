"""Checkpoints with an edit."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor]], object]
Rewrite = Callable[[Path, Edit], None]


@pytest.fixture(scope="session")
def rewrite() -> Rewrite:
    """Applies an edit to all tensors of a folder and saves them as one file."""

    def apply(folder: Path, edit: Edit) -> None:
        tensors: dict[str, Tensor] = {}
        for path in folder.glob("*.safetensors"):
            tensors |= load_file(path)
            path.unlink()
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        edit(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")

    return apply
