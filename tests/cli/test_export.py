"""`clover-local export`, and `info` and `verify` of what it writes."""

import json
from pathlib import Path

import pytest

from clover_local.gguf.container import read_file
from tests.cli.conftest import Run


def test_export_gguf_writes_a_file_that_info_describes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    done = run("export", "gguf", "demo", str(path), "--type", "q8_0")
    assert done.code == 0, done.err
    assert f"{path}: 5 MB" in done.out
    assert read_file(path).metadata["general.name"] == "demo"
    again = run("export", "gguf", "demo", str(path), "--type", "Q8_0")
    assert "is finished already: nothing to do" in again.out
    shown = run("info", str(path))
    assert shown.code == 0
    for line in (
        "qwen35moe",
        "Q8_0 4.13 M",
        "modes: denoise, ar",
        "every one that has Qwen3.5 MoE",
    ):
        assert line in shown.out
    facts = json.loads(run("info", str(path), "--json").out)
    assert facts["gguf"]["architecture"] == "qwen35moe"
    assert facts["gguf"]["diffusion_file"] == str(path)
    assert 8 < facts["quantization"]["bits_per_weight"] < 9
    assert facts["tokenizer"]["tokens"] == 1016


def test_a_sidecar_is_written_and_found(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    done = run("export", "gguf", "demo", str(path), "--type", "Q8_0", "--diffusion", "sidecar")
    sidecar = tmp_path / "demo.diffusion.gguf"
    assert f"{sidecar}: the diffusion parameters" in done.out
    facts = json.loads(run("info", str(path), "--json").out)
    assert facts["gguf"]["diffusion_file"] == str(sidecar)
    assert facts["weights"]["modes"] == ["denoise", "ar", "draft"]
    sidecar.unlink()
    facts = json.loads(run("info", str(path), "--json").out)
    assert facts["gguf"]["diffusion_file"] is None
    assert facts["weights"]["modes"] == ["ar"]
    for _ in range(2):  # one sidecar may replace another
        alone = run("export", "diffusion", "demo", str(tmp_path / "demo.diffusion.gguf"))
        assert alone.code == 0
    assert json.loads(run("info", str(path), "--json").out)["weights"]["modes"][0] == "denoise"


@pytest.mark.parametrize("command", ["diffusion", "gguf"])
def test_a_sidecar_replaces_no_model(command: str, run: Run, tmp_path: Path) -> None:
    model = tmp_path / "x.diffusion.gguf"
    assert run("export", "gguf", "demo", str(model), "--type", "Q8_0").code == 0
    before = model.read_bytes()
    flags = ["--diffusion", "sidecar"] if command == "gguf" else []
    out = tmp_path / "x.gguf" if command == "gguf" else model
    refused = run("export", command, str(model), str(out), *flags)
    assert refused.code == 1
    assert refused.err.splitlines()[-1] == (
        f"error: {model} exists and is another file: remove it or choose another name"
    )
    assert model.read_bytes() == before
    assert not (tmp_path / "x.gguf").exists()


def test_no_sidecar_is_written_beside_a_file_that_is_another_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something")
    assert run("export", "gguf", "demo", str(tmp_path / "x.gguf"), "--diffusion", "sidecar").code
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_only_an_export_of_weights_says_that_they_are_rounded_again(
    run: Run, tmp_path: Path
) -> None:
    model = str(tmp_path / "x.gguf")
    assert run("export", "gguf", "demo", model, "--type", "Q8_0").code == 0
    again = run("export", "gguf", model, str(tmp_path / "y.gguf"), "--type", "F16")
    assert "rounded again" in again.err
    assert run("export", "diffusion", model, str(tmp_path / "z.gguf")).err == ""


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--type", "Q9"), "--type Q9 is unknown: use one of F32"),
        (("--preset", "x"), "--preset x is unknown"),
        (("--arch", "llama"), "--arch llama is unknown: use qwen35moe or clover-moe"),
        (("--diffusion", "x"), "--diffusion x is unknown: use embed or sidecar or none"),
        (("--imatrix", "absent.gguf"), "absent.gguf cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_flags_are_refused_before_anything_is_written(
    flags: tuple[str, ...], complaint: str, run: Run, tmp_path: Path
) -> None:
    done = run("export", "gguf", "demo", str(tmp_path / "x.gguf"), *flags)
    assert done.code == 1
    assert complaint in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_source_is_exported_with_a_note(
    run: Run, quantized_folder: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "x.gguf")
    done = run("export", "gguf", str(quantized_folder), out, "--type", "Q8_0")
    assert done.code == 0
    assert "this model is quantized already" in done.err


def test_info_says_in_one_line_what_is_wrong_with_a_bad_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    done = run("info", str(path))
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "is damaged (truncated" in done.err


def test_verify_says_that_it_reads_folders(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"x")
    assert "verify reads folders" in run("verify", str(path)).err
