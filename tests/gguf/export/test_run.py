"""Whole files: what is in them, whoever made the source, and after a kill."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clover_local.checkpoint.placements import Checkpoint
from clover_local.errors import CheckpointError
from clover_local.gguf.container import GgufTensor, read_file
from clover_local.gguf.export import run, source
from clover_local.gguf.export.ggml import find_ggml
from clover_local.gguf.export.mixtures import mixture
from clover_local.gguf.export.run import export_gguf, make_plan
from clover_local.gguf.imatrix import Sums
from tests.conftest import SaveShards
from tests.gguf.conftest import ExportTo, OpenSource

Floats = NDArray[np.float32]


def tensors(path: Path) -> dict[str, GgufTensor]:
    return {tensor.name: tensor for tensor in read_file(path).tensors}


def floats(tensor: GgufTensor) -> Floats:
    content = tensor.path.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
    return np.frombuffer(content, "<f4").reshape(tensor.shape)


def parameter(checkpoint: Checkpoint, name: str) -> Floats:
    from clover_local.checkpoint.read import read_weight

    weight = read_weight(checkpoint.parts[name, None][0])
    assert isinstance(weight, torch.Tensor)
    values: Floats = weight.float().numpy()
    return values


def test_values_are_changed_as_llama_cpp_wants_them(
    golden_folder: Path, tmp_path: Path, export_to: ExportTo, open_source: OpenSource
) -> None:
    found = tensors(export_to(str(golden_folder), tmp_path / "x.gguf"))
    checkpoint = open_source(str(golden_folder)).checkpoint

    def of(name: str) -> Floats:
        return parameter(checkpoint, name)

    heads = [0, 2, 1, 3]  # 2 key heads with 2 value heads each
    gdn = "layers.0.linear_attn."
    same = np.array_equal
    assert same(floats(found["blk.0.attn_norm.weight"]), 1 + of("layers.0.input_layernorm.weight"))
    assert same(floats(found["blk.0.ssm_norm.weight"]), of(gdn + "norm.weight"))
    assert same(
        floats(found["blk.0.ssm_a"]), (-np.exp(of(gdn + "A_log").astype("f8"))).astype("f4")[heads]
    )
    assert same(floats(found["blk.0.ssm_dt.bias"]), of(gdn + "dt_bias")[heads])
    assert same(floats(found["blk.0.ssm_beta.weight"]), of(gdn + "in_proj_b.weight")[heads])
    rows = of(gdn + "in_proj_qkv.weight")
    tiled = rows[128:].reshape(4, 32, 64)[heads].reshape(128, 64)
    assert same(floats(found["blk.0.attn_qkv.weight"]), np.concatenate([rows[:128], tiled]))
    columns = of(gdn + "out_proj.weight").reshape(64, 4, 32)[:, heads].reshape(64, 128)
    assert same(floats(found["blk.0.ssm_out.weight"]), columns)
    assert same(floats(found["blk.3.attn_q.weight"]), of("layers.3.self_attn.q_proj.weight"))
    gate_up = of("layers.1.mlp.experts.gate_up_proj")
    assert same(floats(found["blk.1.ffn_gate_exps.weight"]), gate_up[:, :32])
    assert same(floats(found["blk.1.ffn_up_exps.weight"]), gate_up[:, 32:])
    gate = floats(found["blk.0.ffn_gate_inp_shexp.weight"])
    assert gate.shape == (64,)
    assert same(gate, of("layers.0.mlp.shared_expert_gate.weight")[0])


def test_experts_apart_on_disk_give_the_same_file(
    golden_folder: Path,
    model_folder: Path,
    save_shards: SaveShards,
    tmp_path: Path,
    export_to: ExportTo,
) -> None:
    from safetensors.torch import load_file

    apart = {}
    for name, tensor in load_file(model_folder / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, rows in enumerate(tensor):
                for half, matrix in zip(("gate", "up"), rows.chunk(2), strict=True):
                    apart[f"{stem}.{expert}.{half}_proj.weight"] = matrix
        elif last == "down_proj":
            for expert, matrix in enumerate(tensor):
                apart[f"{stem}.{expert}.down_proj.weight"] = matrix
        else:
            apart[name] = tensor
    save_shards(model_folder, [apart])
    one = tensors(export_to(str(golden_folder), tmp_path / "one.gguf"))
    other = tensors(export_to(str(model_folder), tmp_path / "other.gguf"))
    assert one.keys() == other.keys()
    for name in one:
        assert np.array_equal(floats(one[name]), floats(other[name])), name


def test_an_int4_checkpoint_exports_what_its_integers_stand_for(
    quantized_folder: Path, tmp_path: Path, export_to: ExportTo, open_source: OpenSource
) -> None:
    found = tensors(export_to(str(quantized_folder), tmp_path / "x.gguf"))
    from clover_local.checkpoint.read import read_experts

    opened = open_source(str(quantized_folder))
    gate_up, _ = read_experts(opened.checkpoint, opened.config, 2, [5])
    assert not isinstance(gate_up[0], torch.Tensor)
    gate = gate_up[0].dequantize()[:32].numpy()
    assert np.array_equal(floats(found["blk.2.ffn_gate_exps.weight"])[5], gate)


def test_small_pieces_and_many_threads_change_no_byte(
    tmp_path: Path, export_to: ExportTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export_to("demo", tmp_path / "a.gguf", file_type="Q8_0").read_bytes()
    monkeypatch.setattr(source, "PIECE_NUMBERS", 999)
    assert export_to("demo", tmp_path / "b.gguf", file_type="Q8_0").read_bytes() == whole


def test_only_as_many_pieces_as_the_window_are_in_memory() -> None:
    made = done = 0
    with ThreadPoolExecutor(2) as pool:

        def futures() -> Iterator[Future[int]]:
            nonlocal made
            for number in range(50):
                made += 1
                yield pool.submit(abs, number)

        results = []
        for result in run._in_order(futures(), 4):
            done += 1
            results.append(result)
            assert made - done < 4
    assert results == list(range(50))


@pytest.mark.parametrize("kill_at", [1, 60, 110])
def test_a_killed_export_goes_on_to_the_same_bytes(
    kill_at: int, tmp_path: Path, export_to: ExportTo
) -> None:
    script = [sys.executable, str(Path(__file__).with_name("killed_export.py"))]
    path = tmp_path / "x.gguf"
    killed = subprocess.run([*script, str(path), str(kill_at)], check=False, capture_output=True)
    assert killed.returncode < 0, killed.stderr
    assert not path.exists()
    again = subprocess.run([*script, str(path), "-1"], check=True, capture_output=True, text=True)
    if kill_at > 1:
        assert int(again.stdout) < 147  # tensors: it did not begin anew
    whole = export_to("demo", tmp_path / "whole.gguf", file_type="Q8_0").read_bytes()
    assert path.read_bytes() == whole
    assert sorted(tmp_path.iterdir()) == [tmp_path / "whole.gguf", path]


def test_diffusion_parameters_go_where_they_are_asked_to(
    golden_folder: Path, tmp_path: Path, export_to: ExportTo
) -> None:
    def keys(path: Path) -> set[str]:
        return {key for key in read_file(path).metadata if key.startswith("clover.blk.")}

    for place in ("embed", "sidecar", "none"):
        path = export_to(str(golden_folder), tmp_path / f"{place}.gguf", diffusion=place)
        assert len(keys(path)) == (3 * 4 if place == "embed" else 0)
        sidecar = tmp_path / f"{place}.diffusion.gguf"
        assert sidecar.exists() == (place == "sidecar")
        if place == "sidecar":
            assert len(keys(sidecar)) == 3 * 4


@pytest.mark.skipif(find_ggml() is None, reason="libggml-python is not installed")
def test_importance_reaches_its_tensor_and_its_expert(
    golden_folder: Path, tmp_path: Path, export_to: ExportTo
) -> None:
    generator = np.random.default_rng(5)
    name = "blk.1.ffn_up_exps.weight"
    squares = generator.exponential(size=(8, 64)).astype(np.float32) ** 3
    counts = np.ones(8, np.float32)
    counts[3] = 0  # saw nothing

    def content(imatrix: dict[str, Sums] | None, file: str) -> dict[str, bytes]:
        path = export_to(str(golden_folder), tmp_path / file, file_type="Q4_K_M", imatrix=imatrix)
        data = path.read_bytes()
        return {key: data[t.start : t.start + t.nbytes] for key, t in tensors(path).items()}

    without, ours = content(None, "a.gguf"), content({name: Sums(squares, counts)}, "b.gguf")
    assert [key for key in ours if ours[key] != without[key]] == [name]
    ones = content({name: Sums(np.ones((8, 64), np.float32), np.ones(8, np.float32))}, "c.gguf")
    each = len(ours[name]) // 8
    for expert in range(8):
        part = slice(expert * each, (expert + 1) * each)
        assert (ours[name][part] == ones[name][part]) == (expert == 3)


def test_an_imatrix_of_another_model_is_refused(
    golden_folder: Path, open_source: OpenSource
) -> None:
    opened = open_source(str(golden_folder))
    mix = mixture("Q8_0", None, has_imatrix=True)
    plan: Callable[..., object] = make_plan
    for name, columns, complaint in (
        ("blk.0.attn_qkv.weight", 65, "use that of this model"),
        ("blk.99.x", 64, "names no tensor of this model"),
    ):
        sums = {name: Sums(np.ones((1, columns), np.float32), np.ones(1, np.float32))}
        with pytest.raises(CheckpointError, match=complaint):
            plan(opened, mix, architecture="qwen35moe", diffusion="none", imatrix=sums)


def test_nan_is_refused_by_the_name_of_its_tensor(
    model_folder: Path, save_shards: SaveShards, tmp_path: Path, export_to: ExportTo
) -> None:
    from safetensors.torch import load_file

    weights = load_file(model_folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.experts.down_proj"))
    weights[name][2, 0, 0] = float("nan")
    save_shards(model_folder, [weights])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj holds NaN"):
        export_to(str(model_folder), tmp_path / "x.gguf")


def test_a_finished_export_is_not_made_again(
    golden_folder: Path, tmp_path: Path, open_source: OpenSource
) -> None:
    opened = open_source(str(golden_folder))
    mix = mixture("F32", None, has_imatrix=False)
    plan = make_plan(opened, mix, architecture="qwen35moe", diffusion="embed")
    path = tmp_path / "x.gguf"
    assert not export_gguf(opened, path, plan, diffusion="embed", jobs=1).was_finished
    before = path.stat().st_mtime_ns
    assert export_gguf(opened, path, plan, diffusion="embed", jobs=1).was_finished
    assert path.stat().st_mtime_ns == before
    other = make_plan(
        replace(opened, name="another"), mix, architecture="qwen35moe", diffusion="embed"
    )
    with pytest.raises(CheckpointError, match="exists and is another file"):
        export_gguf(opened, path, other, diffusion="embed", jobs=1)


@pytest.mark.skipif(find_ggml() is None, reason="libggml-python is not installed")
@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q3_K_M", "IQ4_XS", "Q4_0"])
def test_bytes_of_real_head_dimensions_are_those_of_libgguf(
    file_type: str, wide_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    libgguf = pytest.importorskip("libgguf")
    gguf = pytest.importorskip("gguf")
    exact = tensors(export_to(str(wide_folder), tmp_path / "exact.gguf"))
    path = export_to(str(wide_folder), tmp_path / "x.gguf", file_type=file_type)
    content = path.read_bytes()
    kinds = set()
    for name, tensor in tensors(path).items():
        ours = content[tensor.start : tensor.start + tensor.nbytes]
        values = floats(exact[name])
        if tensor.type.name != "F32":
            kinds.add(tensor.type.name)
            kind = gguf.GGMLQuantizationType(tensor.type.number)
            rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]))
            values = libgguf.quantize_rows(rows, kind)
        assert ours == np.ascontiguousarray(values).tobytes(), name
    assert len(kinds) >= (1 if file_type == "Q6_K" else 2)
