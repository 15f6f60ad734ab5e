"""`verify`: whole files pass, and each kind of damage is found in the right file."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clover_local.cli.verify import check_files

Run = Callable[..., Any]
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(folder: Path, **wrong: str) -> None:
    sums = {name: sha256(folder / name) for name in FILES} | wrong
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def test_every_file_has_a_line_with_its_hash(run: Run, model_folder: Path) -> None:
    outcome = run("verify", str(model_folder))
    assert outcome.code == 0
    expected = [f"ok     {sha256(model_folder / name)}  {name}" for name in FILES]
    assert outcome.out.splitlines() == expected


def test_json_holds_the_same(run: Run, model_folder: Path) -> None:
    outcome = run("verify", str(model_folder), "--json")
    values = json.loads(outcome.out)
    assert outcome.code == 0
    assert [file["name"] for file in values["files"]] == FILES
    weights = values["files"][2]
    assert weights == {
        "name": "model.safetensors",
        "bytes": 864600,
        "sha256": sha256(model_folder / "model.safetensors"),
        "agrees_with": [],
        "problems": [],
    }
    assert values["problems"] == []


def test_hashes_are_compared_with_the_sums_file(run: Run, model_folder: Path) -> None:
    write_sums(model_folder)
    outcome = run("verify", str(model_folder))
    assert outcome.code == 0
    assert outcome.out.count("as in SHA256SUMS") == len(FILES)


def test_a_single_changed_bit_is_found_by_the_sums_file(run: Run, model_folder: Path) -> None:
    write_sums(model_folder)
    path = model_folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    wrong = [line for line in outcome.out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == 1
    assert "model.safetensors  has another sha256 than in SHA256SUMS" in wrong[0]
    assert "model.safetensors has another sha256" in outcome.err
    assert outcome.err.splitlines()[-1].endswith(": download what is wrong again")


def test_a_file_of_the_sums_that_is_absent_is_wrong(run: Run, model_folder: Path) -> None:
    write_sums(model_folder, **{"README.md": "0" * 64})
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    assert "README.md  is in SHA256SUMS but not in the folder" in outcome.out


@pytest.mark.parametrize(
    "content",
    [b"abc  model.safetensors\n", b"0" * 64 + b"  ../outside\n", b"\xff\xff\n"],
    ids=["short", "outside", "not-utf8"],
)
def test_a_sums_file_that_is_none_is_refused(run: Run, model_folder: Path, content: bytes) -> None:
    (model_folder / "SHA256SUMS").write_bytes(content)
    outcome = run("verify", str(model_folder))
    assert (outcome.code, outcome.out) == (1, "")
    assert "SHA256SUMS" in outcome.err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_tensors_that_hold_no_numbers_are_named(
    run: Run, model_folder: Path, dtype: torch.dtype, value: float
) -> None:
    path = model_folder / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    name = "model.layers.2.linear_attn.A_log"
    tensors[name][3] = value
    save_file(tensors, path)
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    assert f"model.safetensors  holds NaN or infinity in {name}\n" in outcome.out


def test_the_largest_finite_numbers_are_no_problem(run: Run, model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"].fill_(torch.finfo(torch.bfloat16).min)
    tensors["model.norm.weight"].fill_(torch.finfo(torch.bfloat16).max)
    save_file(tensors, path)
    assert run("verify", str(model_folder)).code == 0


def test_a_tensor_longer_than_one_read_is_read_to_its_end(
    tmp_path: Path, golden_folder: Path
) -> None:
    large = torch.zeros(2_100_001, dtype=torch.float32)
    large[-1] = float("nan")
    save_file({"large": large, "small": torch.zeros(3)}, tmp_path / "a.safetensors")
    (report,) = check_files(tmp_path)
    assert report.problems == ("holds NaN or infinity in large",)
    assert report.sha256 == sha256(tmp_path / "a.safetensors")


def test_progress_ends_at_the_size_of_all_files(model_folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    reports = check_files(model_folder, lambda done, total: steps.append((done, total)))
    size = sum(report.bytes for report in reports)
    assert steps[-1] == (size, size)


def test_a_truncated_file_is_wrong(run: Run, model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    assert "model.safetensors  is damaged (truncated, 864599 bytes of 864600)" in outcome.out
    assert outcome.err.splitlines()[-1].count("download") == 1


def test_whole_files_that_do_not_fit_together_are_an_error(run: Run, model_folder: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    config["num_experts"] = 9
    (model_folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    outcome = run("verify", str(model_folder), "--json")
    assert outcome.code == 1
    values = json.loads(outcome.out)
    assert all(not file["problems"] for file in values["files"])
    assert "12 misshapen" in values["problems"][0]
    assert "12 misshapen" in outcome.err


def test_a_model_without_weights_is_an_error(run: Run, model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    assert "holds no .safetensors file" in outcome.err


def in_hub_cache(folder: Path, cache: Path, blob: str) -> Path:
    """The weights as the hub's client links them: by the sha256 that the hub gave."""
    snapshot = cache / "snapshots" / "0"
    blobs = cache / "blobs"
    blobs.mkdir()
    shutil.copytree(folder, snapshot)
    (snapshot / "model.safetensors").rename(blobs / blob)
    (snapshot / "model.safetensors").symlink_to(Path("..") / ".." / "blobs" / blob)
    return snapshot


def test_hub_files_are_compared_with_the_hash_in_their_name(
    run: Run, model_folder: Path, tmp_path: Path
) -> None:
    right = sha256(model_folder / "model.safetensors")
    outcome = run("verify", str(in_hub_cache(model_folder, tmp_path, right)))
    assert outcome.code == 0
    assert f"{right}  model.safetensors  as in the hub" in outcome.out


def test_a_hub_file_with_another_hash_is_wrong(
    run: Run, model_folder: Path, tmp_path: Path
) -> None:
    outcome = run("verify", str(in_hub_cache(model_folder, tmp_path, "0" * 64)))
    assert outcome.code == 1
    assert "model.safetensors  has another sha256 than in the hub" in outcome.out


def test_write_makes_a_sums_file_that_sha256sum_and_verify_accept(
    run: Run, model_folder: Path
) -> None:
    before = set(os.listdir(model_folder))
    assert run("verify", str(model_folder), "--write").code == 0
    assert set(os.listdir(model_folder)) == before | {"SHA256SUMS"}
    lines = (model_folder / "SHA256SUMS").read_bytes().decode().splitlines()
    assert lines == [f"{sha256(model_folder / name)}  {name}" for name in FILES]
    outcome = run("verify", str(model_folder))
    assert outcome.out.count("as in SHA256SUMS") == len(FILES)


def test_write_does_not_bless_what_is_wrong(run: Run, model_folder: Path) -> None:
    write_sums(model_folder, **{"config.json": "0" * 64})
    before = (model_folder / "SHA256SUMS").read_bytes()
    assert run("verify", str(model_folder), "--write").code == 1
    assert (model_folder / "SHA256SUMS").read_bytes() == before


def test_verify_does_not_import_torch(golden_folder: Path) -> None:
    script = (
        "import sys\n"
        "from clover_local.cli.verify import verify\n"
        "verify(sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(golden_folder)], check=True, timeout=120)


def test_a_broken_generation_config_is_an_error(run: Run, model_folder: Path) -> None:
    (model_folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    outcome = run("verify", str(model_folder))
    assert outcome.code == 1
    assert "eos_token_id 99999" in outcome.err


def test_a_quantized_model_is_right_and_its_integers_are_no_floats(
    run: Run, quantized_copy: Path
) -> None:
    path = quantized_copy / "model-00001-of-00005.safetensors"
    tensors = load_file(path)
    words = tensors["model.layers.0.mlp.experts.0.up_proj.weight_packed"]
    words.fill_(0x7F807F80)  # infinities, if they were read as BF16
    save_file(tensors, path)
    (quantized_copy / "clover-summary.json").unlink()
    outcome = run("verify", str(quantized_copy))
    assert outcome.code == 0
    assert "WRONG" not in outcome.out


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_scale_that_is_no_number_is_named(run: Run, quantized_copy: Path, value: float) -> None:
    path = quantized_copy / "model-00003-of-00005.safetensors"
    name = "model.layers.2.mlp.experts.7.down_proj.weight_scale"
    tensors = load_file(path)
    tensors[name][3, 0] = value
    save_file(tensors, path)
    outcome = run("verify", str(quantized_copy))
    assert outcome.code == 1
    assert f"{path.name}  holds NaN or infinity in {name}\n" in outcome.out


def test_a_packed_matrix_that_does_not_fit_is_wrong_as_a_whole(
    run: Run, quantized_copy: Path
) -> None:
    path = quantized_copy / "model-00005-of-00005.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight_shape"] = torch.tensor([512, 63])
    save_file(tensors, path)
    outcome = run("verify", str(quantized_copy))
    assert outcome.code == 1
    assert "lm_head.weight_shape says [512, 63], expected [512, 64]" in outcome.err


def test_a_summary_of_other_weights_is_wrong(run: Run, quantized_copy: Path) -> None:
    path = quantized_copy / "clover-summary.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["embedding"][0]["bytes"] += 2
    path.write_text(json.dumps(values), encoding="utf-8")
    outcome = run("verify", str(quantized_copy))
    assert outcome.code == 1
    assert "clover-summary.json describes other weights: remove it" in outcome.err
