"""`info`: what it says of a model, whole, in part, and damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Run = Callable[..., Any]


def facts(run: Run, folder: Path, *, code: int = 0) -> dict[str, Any]:
    outcome = run("info", str(folder), "--json")
    assert outcome.code == code
    values: dict[str, Any] = json.loads(outcome.out)
    return values


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | changes), encoding="utf-8")


def test_json_holds_shape_weights_tokenizer_and_controls(run: Run, golden_folder: Path) -> None:
    values = facts(run, golden_folder)
    assert values["architectures"] == ["CloverMoeModelLM"]
    assert values["parameters"]["total"] == 427804
    assert values["config"]["mask_token_id"] == 510
    assert values["config"]["coreset_top_p"] == 0.8
    assert values["weight_files"] == 1
    assert values["weights"] == {
        "bytes": 864600,
        "parameters_by_dtype": {"BF16": 427804},
        "diffusion_parameters": True,
        "modes": ["denoise", "ar", "draft"],
        "notes": [],
    }
    assert values["tokenizer"] == {"tokens": 508, "chat_template": True, "can_think": False}
    assert values["response_controls"]["stop_ids"] == [506, 507]
    assert values["response_controls"]["dllm_think_end_token_id"] == 505
    assert values["problems"] == []


def test_active_parameters_are_the_experts_of_one_token_and_all_else_but_the_look_up(
    run: Run, golden_folder: Path
) -> None:
    idle_experts = 4 * (8 - 2) * 3 * 64 * 32
    expected = 427804 - idle_experts - 512 * 64
    assert facts(run, golden_folder)["parameters"]["active"] == expected


@pytest.mark.parametrize(
    "shown",
    [
        "428 k, 248 k active per token",
        "4: 3 Gated DeltaNet, 1 attention; hidden size 64",
        "8 a layer, 2 per token + 1 shared",
        "32 rows, mask id 510",
        "experts of mass 0.8",
        "dllm_think_end_token_id 505",
        "865 kB in 1 file(s)",
        "BF16 428 k",
        "present; modes: denoise, ar",
        "508 tokens",
        "yes, without a switch for thinking",
    ],
)
def test_the_table_says(run: Run, golden_folder: Path, shown: str) -> None:
    outcome = run("info", str(golden_folder))
    assert outcome.code == 0
    assert shown in outcome.out
    assert outcome.err == ""


def test_controls_at_their_neutral_value_are_not_in_the_table(
    run: Run, golden_folder: Path
) -> None:
    assert "penalty" not in run("info", str(golden_folder)).out


def test_a_folder_with_only_a_config_says_that_the_rest_is_absent(
    run: Run, model_folder: Path
) -> None:
    for path in model_folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    values = facts(run, model_folder)
    assert (values["weights"], values["weight_files"], values["tokenizer"]) == (None, 0, None)
    assert values["parameters"]["total"] == 427804
    table = run("info", str(model_folder)).out
    assert "weights              absent" in table
    assert "tokenizer            absent" in table


def test_unknown_config_keys_are_listed(run: Run, model_folder: Path) -> None:
    edit_json(model_folder / "config.json", zebra=1, aardvark={"a": 2})
    assert facts(run, model_folder)["config"]["unknown_keys"] == ["aardvark", "zebra"]
    assert "aardvark, zebra" in run("info", str(model_folder)).out


def test_a_causal_only_file_works_in_ar_alone(run: Run, model_folder: Path) -> None:
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    causal = {k: v for k, v in tensors.items() if "conv_right" not in k and "bd_" not in k}
    save_file(causal, path)
    values = facts(run, model_folder)
    assert values["weights"]["modes"] == ["ar"]
    assert values["parameters"]["total"] == sum(v.numel() for v in causal.values())
    assert "absent; modes: ar" in run("info", str(model_folder)).out


def test_a_thinking_template_is_noticed(run: Run, model_folder: Path) -> None:
    template = "{% if enable_thinking %}{% endif %}"
    (model_folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert facts(run, model_folder)["tokenizer"]["can_think"]
    assert "yes, with a switch for thinking" in run("info", str(model_folder)).out


def test_the_absence_of_a_template_is_noticed(run: Run, model_folder: Path) -> None:
    (model_folder / "tokenizer_config.json").unlink()
    assert not facts(run, model_folder)["tokenizer"]["chat_template"]


def test_the_demo_model_has_a_name(run: Run) -> None:
    outcome = run("info", "demo", "--json")
    values = json.loads(outcome.out)
    assert values["config"]["block_size"] == 32
    assert values["tokenizer"]["can_think"]


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["surplus"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(3, dtype=torch.bfloat16)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut_weights, "truncated, 864500 bytes of 864600"),
        (remove_tensor, "1 missing (model.norm.weight); 1 surplus (surplus); 1 misshapen (lm_head"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), "is not UTF-8"),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
            "the chat template is broken",
        ),
    ],
    ids=["truncated", "misfit", "tokenizer", "template"],
)
def test_damaged_files_are_shown_with_what_is_known_and_end_in_an_error(
    run: Run, model_folder: Path, damage: Callable[[Path], object], complaint: str
) -> None:
    damage(model_folder)
    values = facts(run, model_folder, code=1)
    assert values["config"]["vocab_size"] == 512
    assert complaint in values["problems"][0]
    outcome = run("info", str(model_folder))
    assert outcome.code == 1
    assert "mask id 510" in outcome.out
    assert outcome.err.startswith("error: ")
    assert complaint in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', only 'clover_moe' is supported"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', expected an integer"),
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(
    run: Run, model_folder: Path, changes: dict[str, object], complaint: str
) -> None:
    edit_json(model_folder / "config.json", **changes)
    outcome = run("info", str(model_folder))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert complaint in outcome.err


def test_what_is_no_folder_is_one_line(run: Run, tmp_path: Path) -> None:
    outcome = run("info", str(tmp_path / "absent"))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert "there is no folder" in outcome.err


QUANTIZED = [
    "BF16",
    "INT4 g32 197 k, INT8 g32 190 k, BF16 41.2 k",
    "bits per weight",
    "INT4 g32 112 kB",
    "one expert            3.46 kB",
]


@pytest.mark.parametrize("shown", QUANTIZED)
def test_the_table_says_how_weights_are_quantized(
    run: Run, quantized_folder: Path, shown: str
) -> None:
    outcome = run("info", str(quantized_folder))
    assert (outcome.code, outcome.err) == (0, "")
    assert shown in outcome.out


def test_json_says_how_weights_are_quantized(run: Run, quantized_folder: Path) -> None:
    values = facts(run, quantized_folder)
    quantization = values["quantization"]
    assert quantization["experts_bits_per_weight"] == 4.5625
    (experts,) = quantization["summary"]["experts"]
    assert (experts["format"], experts["group_size"], experts["numbers"]) == ("INT4", 32, 196608)
    assert quantization["summary"]["records"][0] == [{"bytes": 3456, "experts": 8}]
    nbytes = sum(path.stat().st_size for path in quantized_folder.glob("*.safetensors"))
    assert values["weights"]["bytes"] == nbytes
    assert values["weights"]["modes"] == ["denoise", "ar", "draft"]
    assert values["parameters"]["total"] == 427804
    assert values["problems"] == []


def test_nothing_quantized_is_null(run: Run, golden_folder: Path) -> None:
    assert facts(run, golden_folder)["quantization"] is None


def test_without_its_summary_a_quantized_model_is_described_from_the_headers(
    run: Run, quantized_copy: Path
) -> None:
    with_summary = facts(run, quantized_copy)
    (quantized_copy / "clover-summary.json").unlink()
    without = facts(run, quantized_copy)
    assert without == with_summary


def test_a_summary_of_other_weights_is_not_believed(run: Run, quantized_copy: Path) -> None:
    edit_json(quantized_copy / "clover-summary.json", head=[], shards=[{"name": "a", "bytes": 1}])
    assert facts(run, quantized_copy)["quantization"]["summary"]["head"]


def test_a_summary_does_not_hide_a_format_that_nothing_else_reads(
    run: Run, quantized_copy: Path
) -> None:
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    edit_json(quantized_copy / "config.json", quantization_config=settings)
    result = run("info", str(quantized_copy))
    assert result.code == 1
    assert "format float-quantized: use the unquantized checkpoint" in result.err


def test_the_quantization_is_known_before_the_weights_are_there(
    run: Run, quantized_copy: Path
) -> None:
    for path in quantized_copy.glob("*.safetensors"):
        path.unlink()
    values = facts(run, quantized_copy)
    assert values["weights"] is None
    assert values["quantization"]["experts_bits_per_weight"] == 4.5625


def test_weights_of_another_method_are_refused_with_the_remedy(
    run: Run, model_folder: Path
) -> None:
    edit_json(model_folder / "config.json", quantization_config={"quant_method": "gptq"})
    (problem,) = facts(run, model_folder, code=1)["problems"]
    assert "quantized by gptq: import them with `clover-local quantize" in problem


def test_an_unfinished_quantization_says_how_to_go_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".quantize").mkdir()
    outcome = run("info", str(tmp_path))
    assert outcome.code == 1
    assert "run the same `clover-local quantize` again" in outcome.err
