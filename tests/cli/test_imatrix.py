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


def test_no_other_file_is_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    for _ in range(2):  # an imatrix may replace another
        assert run("imatrix", "demo", str(path), "--calibration-tokens", "64").code == 0
    model = tmp_path / "x.gguf"
    assert run("export", "gguf", "demo", str(model), "--type", "Q8_0").code == 0
    before = model.read_bytes()
    refused = run("imatrix", str(model), str(model), "--calibration-tokens", "64")
    assert refused.code == 1
    assert f"{model} exists and is another file: remove it" in refused.err
    homeless = run("imatrix", "demo", str(tmp_path / "no" / "i.gguf"))  # said before it runs
    assert homeless.code == 1
    assert homeless.err.count("\n") == 1
    assert f"there is no folder {tmp_path / 'no'}, make it first" in homeless.err
    assert model.read_bytes() == before
