"""`clover-local imatrix`."""

from pathlib import Path

from clover_local.gguf.imatrix import read_imatrix
from tests.cli.conftest import Run


def test_the_file_is_written_and_export_takes_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    done = run("imatrix", "demo", str(path), "--calibration-tokens", "200")
    assert done.code == 0, done.err
    assert f"{path}: 87 tensors from" in done.out
    sums = read_imatrix(path)
    assert sums["blk.0.ffn_up_exps.weight"].squares.shape == (16, 128)
    out = str(tmp_path / "x.gguf")
    exported = run("export", "gguf", "demo", out, "--type", "Q4_0", "--imatrix", str(path))
    assert exported.code == 0 or "ggml's library" in exported.err
