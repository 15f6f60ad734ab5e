"""From a name to a generator."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from clover_local.decoding.settings import resolve
from clover_local.errors import CheckpointError, CloverError, SettingsError
from clover_local.generate import generate
from clover_local.session import OpenModel, check_context, fingerprint, load, open_model


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


def test_the_context_is_the_models_unless_given(opened: OpenModel) -> None:
    assert check_context(None, opened.config) == 131072
    assert check_context(77, opened.config) == 77
    with pytest.raises(SettingsError, match="131073"):
        check_context(131073, opened.config)


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
    monkeypatch.setenv("CLOVER_KERNELS", "triton")
    loader = "clover_local.checkpoint.load.load_parameters"
    monkeypatch.setattr(loader, lambda *a, **o: pytest.fail("read"))
    settings = resolve(opened.config, opened.generation, {}).settings
    with pytest.raises(SettingsError, match="CLOVER_KERNELS=triton"):
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
