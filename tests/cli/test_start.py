"""What happens before and while a model is loaded."""

import shutil
from pathlib import Path

import pytest

from clover_local.cli import start
from clover_local.decoding.settings import resolve
from clover_local.errors import SettingsError
from clover_local.placement import MemoryOptions
from clover_local.session import OpenModel


def test_given_settings_are_on_top_of_the_models(golden_folder: Path) -> None:
    given = {"max_new_tokens": 7}
    _, resolved = start.open_model(str(golden_folder), given, template_flags={}, strict=False)
    assert resolved.settings.max_new_tokens == 7
    assert resolved.settings.stop_ids == (506, 507)


def test_flags_without_effect_are_found_with_those_of_the_template(
    golden_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"system": "Be brief.", "think": None}
    start.open_model(
        str(golden_folder), {"seed": 3}, template_flags=flags, bypass="--raw", strict=False
    )
    err = capsys.readouterr().err
    assert "--seed has no effect" in err
    assert "--system has no effect with --raw" in err
    assert "--think" not in err
    with pytest.raises(SettingsError, match="--seed"):
        start.open_model(str(golden_folder), {"seed": 3}, template_flags={}, strict=True)


def test_a_model_is_loaded_with_a_note_and_the_seed_of_its_draws(
    opened: OpenModel, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"temperature": 1.0, "seed": 5}
    settings = resolve(opened.config, opened.generation, given).settings
    session = start.load(
        opened,
        settings,
        context=50,
        device="cpu",
        dtype=None,
        memory=MemoryOptions(),
        strict=False,
    )
    assert session.context == 50
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("loading")
    assert lines[-1] == "seed 5"


def test_a_trace_is_opened_only_for_a_path(opened: OpenModel, tmp_path: Path) -> None:
    with start.trace(opened, None) as none:
        assert none is None
    with start.trace(opened, tmp_path / "t.jsonl") as tracing:
        assert tracing is not None
        tracing.write({"record": "header"})
    assert (tmp_path / "t.jsonl").exists()


def test_notes_on_the_weights_are_shown(
    golden_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "causal"
    shutil.copytree(golden_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    extra = ("conv_right_weight", "bd_softmax_")
    causal = {name: x for name, x in tensors.items() if not any(part in name for part in extra)}
    save_file(causal, folder / "model.safetensors")
    start.open_model(str(folder), {}, template_flags={}, strict=False)
    assert "only the mode ar works" in capsys.readouterr().err
