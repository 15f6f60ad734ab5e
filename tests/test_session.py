"""From a name to a generator."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clover_local.cache import SequenceState
from clover_local.checkpoint.load import load_parameters
from clover_local.config import ModelConfig
from clover_local.decoding.settings import resolve
from clover_local.errors import CheckpointError, CloverError, ConfigError, SettingsError
from clover_local.experts.resident import ResidentExperts
from clover_local.generate import generate
from clover_local.kernels.packed import PackedWeight, Weight
from clover_local.model.clover import Clover
from clover_local.session import OpenModel, fingerprint, load, open_model

EmptyState = Callable[[ModelConfig], SequenceState]


@pytest.fixture(scope="module")
def opened(golden_folder: Path) -> OpenModel:
    return open_model(str(golden_folder))


def test_a_session_is_ready_to_generate(opened: OpenModel) -> None:
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 3}).settings
    reports: list[tuple[int, int]] = []
    session = load(
        opened,
        settings,
        context=100,
        device="cpu",
        on_progress=lambda done, total: reports.append((done, total)),
    )
    assert (session.context, session.device, session.dtype) == (100, "cpu", "float32")
    assert session.generator.state.context == 100
    assert reports[-1][0] == reports[-1][1] > 0
    result = generate(session.generator.model, session.generator.state, settings, [1, 2, 3])
    assert len(result.token_ids) == 3


def test_bfloat16_runs_on_a_cpu(opened: OpenModel) -> None:
    settings = resolve(opened.config, opened.generation, {"max_new_tokens": 2}).settings
    session = load(opened, settings, device="cpu", dtype="bfloat16")
    assert session.dtype == "bfloat16"
    assert list(session.generator.run([1, 2]))


def dequantized(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, PackedWeight) else weight


@pytest.fixture(scope="module")
def quantized(quantized_folder: Path) -> OpenModel:
    return open_model(str(quantized_folder))


def test_a_quantized_model_computes_what_its_dequantized_weights_would(
    quantized: OpenModel, empty_state: EmptyState
) -> None:
    settings = resolve(quantized.config, quantized.generation, {}).settings
    model = load(quantized, settings, context=100, device="cpu").model
    loaded = load_parameters(quantized.checkpoint, quantized.config)
    plain = Clover(
        quantized.config,
        {name: dequantized(weight) for name, weight in loaded.parameters.items()},
        experts=ResidentExperts(
            (map(dequantized, gate_up), map(dequantized, down)) for gate_up, down in loaded.experts
        ),
        device="cpu",
        dtype=torch.float32,
    )
    states = [empty_state(quantized.config) for _ in range(2)]
    prompt, block = [5, 77, 300, 41, 2, 9, 480], [33, 510, 510, 8, 510, 510, 510, 12]
    for run in ("commit", "preview"):
        ours, expected = (
            m.commit(prompt, state, logits="all") if run == "commit" else m.preview(block, state)
            for m, state in zip((model, plain), states, strict=True)
        )
        torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_a_quantized_model_generates(quantized: OpenModel) -> None:
    settings = resolve(quantized.config, quantized.generation, {"max_new_tokens": 5}).settings
    for dtype in ("float32", "bfloat16"):
        session = load(quantized, settings, context=100, device="cpu", dtype=dtype)
        assert list(session.generator.run([1, 2, 3]))


def test_an_unfinished_quantization_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / ".quantize").mkdir()
    with pytest.raises(ConfigError, match="unfinished: run the same `clover-local quantize` again"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    "options", [{"device": "tpu"}, {"dtype": "int3"}, {"context": 1 << 20}], ids=str
)
def test_wrong_options_are_refused(opened: OpenModel, options: dict[str, Any]) -> None:
    settings = resolve(opened.config, opened.generation, {}).settings
    with pytest.raises(SettingsError):
        load(opened, settings, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_is_refused_with_the_remedy(opened: OpenModel) -> None:
    settings = resolve(opened.config, opened.generation, {}).settings
    with pytest.raises(SettingsError, match="--device cpu"):
        load(opened, settings, device="cuda")


def test_kernels_that_do_not_exist_are_refused_before_weights_are_read(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_KERNELS", "fast")
    loader = "clover_local.checkpoint.load.load_parameters"
    monkeypatch.setattr(loader, lambda *a, **o: pytest.fail("read"))
    settings = resolve(opened.config, opened.generation, {}).settings
    with pytest.raises(SettingsError, match="CLOVER_KERNELS=fast"):
        load(opened, settings, device="cpu")


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    golden_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(golden_folder, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 512', '"vocab_size": 600'))
    with pytest.raises(CheckpointError, match=r"embed_tokens|lm_head"):
        open_model(str(folder))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CloverError):
        open_model("no/such/folder/at all")


def test_the_fingerprint_tells_weights_apart(
    opened: OpenModel, golden_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(golden_folder, folder)
    assert fingerprint(open_model(str(folder))) == fingerprint(opened)
    tensor = opened.checkpoint.shards[0].tensors[-1]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(tensor.start)
        byte = file.read(1)[0]
        file.seek(tensor.start)
        file.write(bytes([byte ^ 1]))
    assert fingerprint(open_model(str(folder))) != fingerprint(opened)
