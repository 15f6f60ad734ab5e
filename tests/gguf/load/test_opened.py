"""Models from .gguf files: the same answers, sidecars, files of others, and bad ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clover_local.errors import CheckpointError, CloverError, SettingsError
from clover_local.gguf.container import MetaValue
from clover_local.gguf.export.run import export_diffusion
from clover_local.gguf.types import TYPES
from clover_local.hub import locate
from clover_local.session import fingerprint, open_model
from tests.gguf.conftest import ExportTo, OpenSource
from tests.gguf.load.conftest import Answer, Edited

PROMPT = [5, 77, 300, 41, 2, 9, 480]


def demo_prompt() -> list[int]:
    tokenizer = open_model("demo").tokenizer
    return tokenizer.encode(tokenizer.render([{"role": "user", "content": "What is 12 + 30?"}]))


@pytest.mark.parametrize("mode", ["denoise", "ar"])
@pytest.mark.parametrize("file_type", ["F32", "BF16"])
@pytest.mark.parametrize("architecture", ["qwen35moe", "clover-moe"])
def test_what_is_exported_answers_as_the_source(
    mode: str,
    file_type: str,
    architecture: str,
    export_to: ExportTo,
    answer: Answer,
    tmp_path: Path,
) -> None:
    path = export_to("demo", tmp_path / "x.gguf", file_type=file_type, architecture=architecture)
    prompt = demo_prompt()
    assert answer(str(path), prompt, mode=mode) == answer("demo", prompt, mode=mode)


@pytest.mark.parametrize("mode", ["denoise", "ar"])
def test_the_golden_model_too(
    mode: str, golden_folder: Path, golden_gguf: Path, answer: Answer
) -> None:
    expected = answer(str(golden_folder), PROMPT, mode=mode)
    assert answer(str(golden_gguf), PROMPT, mode=mode) == expected


def test_configs_tokenizer_and_template_come_back(export_to: ExportTo, tmp_path: Path) -> None:
    before = open_model("demo")
    after = open_model(str(export_to("demo", tmp_path / "x.gguf")))
    changed = {
        field
        for field in before.config.__dataclass_fields__
        if getattr(before.config, field) != getattr(after.config, field)
    }
    assert changed <= {"dtype", "unknown_keys"}
    assert after.generation == before.generation
    assert after.tokenizer.vocabulary == before.tokenizer.vocabulary
    messages = [{"role": "user", "content": "Hi"}]
    assert after.tokenizer.render(messages) == before.tokenizer.render(messages)
    assert after.checkpoint.has_diffusion
    assert after.checkpoint.notes == ()
    assert fingerprint(after) != fingerprint(before)


def test_an_export_of_an_export_has_the_same_tensors(
    golden_gguf: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    again = Edited(export_to(str(golden_gguf), tmp_path / "again.gguf"))
    first = Edited(golden_gguf)
    assert again.tensors == first.tensors
    for key, value in first.metadata.items():
        if key not in ("general.name", "clover.source_sha256"):
            assert np.array_equal(again.metadata[key], value), key


def test_a_file_of_others_answers_and_refuses_denoise_with_the_remedy(
    golden_ar: Path, golden_folder: Path, answer: Answer
) -> None:
    mask = {"suppress": (510,)}
    expected = answer(str(golden_folder), PROMPT, mode="ar", settings=mask)
    assert answer(str(golden_ar), PROMPT, mode="ar", settings=mask) == expected
    with pytest.raises(SettingsError, match=r"put NAME\.diffusion\.gguf beside .*export diffusion"):
        answer(str(golden_ar), PROMPT, mode="denoise")


def test_with_our_sidecar_it_decodes_by_diffusion(
    golden_ar: Path, golden_folder: Path, answer: Answer, tmp_path: Path, open_source: OpenSource
) -> None:
    path = tmp_path / "theirs.gguf"
    path.write_bytes(golden_ar.read_bytes())
    export_diffusion(open_source(str(golden_folder)), tmp_path / "theirs.diffusion.gguf")
    expected = answer(str(golden_folder), PROMPT, mode="denoise")
    assert answer(str(path), PROMPT, mode="denoise") == expected


def test_a_quantized_file_of_others_takes_the_sidecar_too(
    golden_folder: Path, export_to: ExportTo, tmp_path: Path
) -> None:
    path = export_to(str(golden_folder), tmp_path / "q.gguf", file_type="Q4_0", diffusion="sidecar")
    assert open_model(str(path)).checkpoint.has_diffusion
    (tmp_path / "q.diffusion.gguf").unlink()
    assert not open_model(str(path)).checkpoint.has_diffusion


def test_a_sidecar_of_another_model_is_refused(
    golden_ar: Path, golden_folder: Path, tmp_path: Path, open_source: OpenSource
) -> None:
    path, sidecar = tmp_path / "theirs.gguf", tmp_path / "theirs.diffusion.gguf"
    path.write_bytes(golden_ar.read_bytes())
    export_diffusion(open_source("demo"), sidecar)  # other sizes
    with pytest.raises(CheckpointError, match="belongs to another model than"):
        open_model(str(path))
    export_diffusion(open_source(str(golden_folder)), sidecar)
    edited = Edited(path)
    name = "blk.2.ssm_dt.bias"
    edited.put(name, edited.floats(name) * np.float32(1.01))  # trained a little further
    edited.write(path)
    with pytest.raises(CheckpointError, match="belongs to another model than"):
        open_model(str(path))


def test_what_is_no_sidecar_is_refused(golden_ar: Path, tmp_path: Path) -> None:
    for name in ("theirs.gguf", "theirs.diffusion.gguf"):
        (tmp_path / name).write_bytes(golden_ar.read_bytes())
    with pytest.raises(CheckpointError, match="holds no diffusion parameters"):
        open_model(str(tmp_path / "theirs.gguf"))


def test_a_sidecar_that_is_no_file_is_not_passed_over(golden_ar: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.gguf").write_bytes(golden_ar.read_bytes())
    sidecar = tmp_path / "theirs.diffusion.gguf"
    for target in ("nowhere", sidecar.name, "."):  # nothing, itself, a folder
        sidecar.symlink_to(target)
        with pytest.raises(CheckpointError, match=r"theirs\.diffusion\.gguf cannot be read"):
            open_model(str(tmp_path / "theirs.gguf"))
        sidecar.unlink()


def test_split_files_are_one_model(golden_gguf: Path, answer: Answer, tmp_path: Path) -> None:
    whole = Edited(golden_gguf)
    names = list(whole.tensors)
    for number in range(3):
        piece = Edited(golden_gguf)
        piece.metadata |= {
            "split.no": number,
            "split.count": 3,
            "split.tensors.count": len(names),
        }
        piece.tensors = {name: whole.tensors[name] for name in names[number::3]}
        piece.write(tmp_path / f"m-{number + 1:05}-of-00003.gguf")
    path = tmp_path / "m-00001-of-00003.gguf"
    expected = answer(str(golden_gguf), PROMPT, mode="denoise")
    assert answer(str(path), PROMPT, mode="denoise") == expected


def test_gate_and_up_in_one_tensor_are_read(
    golden_gguf: Path, answer: Answer, tmp_path: Path
) -> None:
    edited = Edited(golden_gguf)
    for layer in range(4):
        halves = [f"blk.{layer}.ffn_{half}_exps.weight" for half in ("gate", "up")]
        joined = np.concatenate([edited.floats(name) for name in halves], 1)
        edited.put(f"blk.{layer}.ffn_gate_up_exps.weight", joined)
        for name in halves:
            del edited.tensors[name]
    path = edited.write(tmp_path / "x.gguf")
    expected = answer(str(golden_gguf), PROMPT, mode="denoise")
    assert answer(str(path), PROMPT, mode="denoise") == expected


def test_layers_that_draft_are_skipped_with_a_note(golden_gguf: Path, tmp_path: Path) -> None:
    edited = Edited(golden_gguf)
    edited.metadata |= {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    edited.put("blk.4.attn_norm.weight", np.ones(64, np.float32))
    edited.put("blk.4.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
    opened = open_model(str(edited.write(tmp_path / "x.gguf")))
    assert opened.config.num_hidden_layers == 4
    assert any("skipped 2 tensors" in note for note in opened.checkpoint.notes)


@pytest.mark.parametrize("name", ["blk.0.something.weight", "blk.0.attn_qkv.bias"])
@pytest.mark.parametrize("architecture", ["qwen35moe", "clover-moe"])
def test_unknown_tensors_are_skipped_in_files_of_clovers_own_architecture_alone(
    architecture: str, name: str, export_to: ExportTo, golden_folder: Path, tmp_path: Path
) -> None:
    path = export_to(str(golden_folder), tmp_path / "x.gguf", architecture=architecture)
    edited = Edited(path)
    edited.put(name, np.ones(4, np.float32))
    edited.write(path)
    if architecture == "clover-moe" and not name.endswith("bias"):
        (note,) = open_model(str(path)).checkpoint.notes
        assert name in note
    else:
        with pytest.raises(CheckpointError, match="1 surplus"):
            open_model(str(path))


def without(key: str) -> Callable[[Edited], object]:
    return lambda edited: edited.metadata.pop(key)


def with_value(key: str, value: MetaValue) -> Callable[[Edited], object]:
    return lambda edited: edited.metadata.update({key: value})


def of_type(name: str, kind: str) -> Callable[[Edited], None]:
    def change(edited: Edited) -> None:
        _, shape, _ = edited.tensors[name]
        rows = int(np.prod(shape[:-1]))
        edited.tensors[name] = (TYPES[kind], shape, bytes(rows * TYPES[kind].row_bytes(shape[-1])))

    return change


BAD = {
    "no rope base": (without("qwen35moe.rope.freq_base"), r"lacks the key qwen35moe\.rope\.freq"),
    "no rotating dimensions": (
        without("qwen35moe.rope.dimension_count"),
        r"lacks the key qwen35moe\.rope\.dimension_count",
    ),
    "scaled rope": (with_value("qwen35moe.rope.scaling.type", "yarn"), "rope_type is 'yarn'"),
    "no layers": (with_value("qwen35moe.block_count", 0), "num_hidden_layers"),
    "negative layers": (with_value("qwen35moe.block_count", -3), "num_hidden_layers"),
    "too many layers": (with_value("qwen35moe.block_count", 10**6), "num_hidden_layers"),
    "no value heads": (with_value("qwen35moe.ssm.time_step_rank", 0), "linear_num_value_heads"),
    "no head_dim": (with_value("qwen35moe.attention.key_length", 0), "head_dim"),
    "another architecture": (
        with_value("general.architecture", "llama"),
        "architecture 'llama', this runtime runs qwen35moe and clover-moe",
    ),
    "no architecture": (without("general.architecture"), "lacks the key general.architecture"),
    "a text for a number": (
        with_value("qwen35moe.embedding_length", "many"),
        "embedding_length is not an integer",
    ),
    "no embedding": (
        lambda edited: edited.tensors.pop("token_embd.weight"),
        r"holds no token_embd\.weight",
    ),
    "a tensor too few": (
        lambda edited: edited.tensors.pop("blk.1.ssm_a"),
        r"1 missing \(blk\.1\.ssm_a\)",
    ),
    "a tensor too many": (
        lambda edited: edited.put("blk.1.attn_q.bias", np.ones(4, np.float32)),
        r"1 surplus \(blk\.1\.attn_q\.bias\)",
    ),
    "another shape": (
        lambda edited: edited.put("output_norm.weight", np.ones(63, np.float32)),
        r"output_norm\.weight is \[63\], expected \[64\]",
    ),
    "a type without a rule": (of_type("blk.0.ssm_out.weight", "MXFP4"), "ssm_out.weight is MXFP4"),
    "diffusion parameters too few": (
        without("clover.blk.1.history_c"),
        r"lacks the key clover\.blk\.1\.history_c",
    ),
    "diffusion parameters too short": (
        with_value("clover.blk.1.history_c", np.ones(3, "<f4")),
        r"clover\.blk\.1\.history_c is no float32 array of \[4\]",
    ),
    "a newer format": (with_value("clover.format_version", 2), "install a newer clover-local"),
    "a tokenizer of another kind": (with_value("tokenizer.ggml.model", "llama"), "is llama with"),
    "merges of unknown tokens": (
        with_value("tokenizer.ggml.merges", ["zz yy"]),
        "its tokenizer is damaged",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), BAD.values(), ids=BAD.keys())
def test_a_bad_model_gives_one_line(
    change: Callable[[Edited], object], complaint: str, golden_gguf: Path, tmp_path: Path
) -> None:
    edited = Edited(golden_gguf)
    change(edited)
    path = edited.write(tmp_path / "bad.gguf")
    with pytest.raises(CloverError, match=complaint) as caught:
        open_model(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_path_that_is_no_gguf_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pass the folder .* or a \.gguf file"):
        locate(str(path))
