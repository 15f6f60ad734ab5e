"""Importance matrices in llama.cpp's form."""

from pathlib import Path

import numpy as np
import pytest

from clover_local.errors import CheckpointError
from clover_local.gguf.imatrix import Sums, imatrix_bytes, read_imatrix
from tests.gguf.conftest import WriteGguf

SUMS = {
    "blk.0.ffn_up_exps.weight": Sums(
        np.array([[2, 4, 6], [0, 0, 0]], "<f4"), np.array([2, 0], "<f4")
    ),
    "blk.0.attn_q.weight": Sums(np.array([[3, 0]], "<f4"), np.array([3], "<f4")),
}


def written(path: Path) -> Path:
    path.write_bytes(imatrix_bytes(SUMS, dataset="our texts", chunks=3, chunk_size=512))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    read = read_imatrix(written(tmp_path / "i.gguf"))
    assert read.keys() == SUMS.keys()
    for name, sums in SUMS.items():
        assert np.array_equal(read[name].squares, sums.squares)
        assert np.array_equal(read[name].counts, sums.counts)


def test_an_expert_that_saw_nothing_gets_ones() -> None:
    importance = SUMS["blk.0.ffn_up_exps.weight"].importance
    assert importance.tolist() == [[1, 2, 3], [1, 1, 1]]
    assert importance.dtype == np.float32


def test_no_input_counts_for_nothing() -> None:
    squares = np.array([[6, 0, 2], [0, 0, 0]], np.float32)
    assert Sums(squares, np.full(2, 2, np.float32)).importance.tolist() == [[3, 1, 1], [1, 1, 1]]


def test_keys_and_tensors_are_those_that_llama_quantize_looks_for(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(written(tmp_path / "i.gguf"))
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["our texts"]
    assert reader.fields["imatrix.chunk_count"].contents() == 3
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes == {  # fastest first
        "blk.0.attn_q.weight.in_sum2": [2, 1],
        "blk.0.attn_q.weight.counts": [1, 1],
        "blk.0.ffn_up_exps.weight.in_sum2": [3, 2],
        "blk.0.ffn_up_exps.weight.counts": [1, 2],
    }


def test_what_is_no_imatrix_is_refused(write_gguf: WriteGguf) -> None:
    with pytest.raises(CheckpointError, match="is no imatrix: make one with"):
        read_imatrix(write_gguf())
    meta = {"general.type": "imatrix"}
    with pytest.raises(CheckpointError, match="without counts"):
        read_imatrix(write_gguf(metadata=meta, shapes={"a.in_sum2": (2, 3)}))
    with pytest.raises(CheckpointError, match="a has 3 counts for"):
        shapes = {"a.in_sum2": (2, 3), "a.counts": (3, 1)}
        read_imatrix(write_gguf(metadata=meta, shapes=shapes))
