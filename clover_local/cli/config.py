"""`clover-local config`: the config file, and which value came from where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clover_local.cli import console, effects
from clover_local.cli import options as o
from clover_local.cli.budget import Thinking, thinks, with_budget
from clover_local.cli.preferences import FILE_VARIABLE, FLAG_KEYS, config_path, shown, template
from clover_local.decoding.settings import Place, ResolvedSettings, Settings, is_given, resolve
from clover_local.errors import SettingsError, concerning
from clover_local.files import replacing
from clover_local.hub import DEMO, DESCRIPTION_FILES, locate

if TYPE_CHECKING:
    from clover_local.config import GenerationConfig, ModelConfig

app = typer.Typer(help="Defaults of flags, from a file and the environment.", rich_markup_mode=None)


@dataclass(frozen=True)
class Row:
    """One key: its value (None: decided when the model is loaded), and what the value is."""

    key: str
    value: object
    source: str
    effect: str  # why it has none; empty: it has one, or nobody set it


@app.command()
@o.configured()
@o.takes_settings
@o.takes_memory
def explain(
    call: typer.Context,
    model: o.OptionalModelArg = None,
    system: o.SystemOpt = None,
    think: o.ThinkOpt = None,
    think_budget: o.ThinkBudgetOpt = None,
    context: o.ContextOpt = None,
    device: o.DeviceOpt = None,
    dtype: o.DtypeOpt = None,
    watch: o.WatchOpt = None,
    stats: o.StatsOpt = None,
    heat: o.HeatOpt = None,
    as_json: o.JsonOpt = False,
    strict: o.StrictOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Show every key, its value and where that is from, as `chat` with these flags would have it.

    Keys are the names of flags: threshold = 0.9 in the config file (`clover-local config path`), or
    CLOVER_THRESHOLD=0.9 in the environment. The model's defaults are below the file, that below
    the environment, flags and /set are above both.
    """
    name = model or DEMO
    o.memory_options(call)  # refuses what cannot be meant
    given, places = o.given_settings(call), o.origins(call)
    thinking = thinks(think, think_budget, places)
    if thinking.budget is not None:
        given, places = with_budget(given, places, thinking.budget)
    with concerning("model"):
        described = _described(name)
    resolved = resolve(*described, given, source=places)
    of_flags = _of_flags(call, {"model": name, "watch": watch or "block"})
    rows = [*_of_settings(resolved), *(_with_thinking(row, thinking) for row in of_flags)]
    path = config_path()
    if as_json:
        console.print_json(
            {
                "model": name,
                "file": None if path is None or not path.exists() else str(path),
                "values": [_json(row) for row in rows],
            }
        )
        return
    where = "no config file" if path is None else f"{path}{'' if path.exists() else ' (not there)'}"
    console.show_table(
        f"{name}; {where}", [(row.key, shown(row.value), row.source, row.effect) for row in rows]
    )


@app.command()
def path() -> None:
    """Show the path of the config file, which need not be there."""
    console.text(str(_path()))


@app.command()
def init() -> None:
    """Write a config file in which every key is a comment; never in the place of another file."""
    target = _path()
    if os.path.lexists(target):
        raise SettingsError(f"{target} is there already: edit it, or remove it first")
    defaults = {field.name: field.default for field in fields(Settings)}
    text = template(lambda key: defaults.get(key))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(text.encode())
    except OSError as error:
        raise SettingsError(
            f"{target} cannot be written ({error.strerror}): set {FILE_VARIABLE} to another path"
        ) from None
    console.text(f"wrote {target}")


def _path() -> Path:
    path = config_path()
    if path is None:
        raise SettingsError(
            f"{FILE_VARIABLE} is {os.devnull}, so there is no config file: unset it"
        )
    return path


def _described(name: str) -> tuple[ModelConfig, GenerationConfig]:
    """What a model says of itself; needs no weights."""
    from clover_local.config import read_generation_config, read_model_config

    folder = locate(name, files=DESCRIPTION_FILES)
    if folder.is_file():
        from clover_local.gguf.load import opened

        config, generation, *_ = opened.match(*opened.read_files(folder))
        return config, generation
    config = read_model_config(folder)
    return config, read_generation_config(folder, config)


def _of_settings(resolved: ResolvedSettings) -> list[Row]:
    given = [key for key, _, source in resolved.rows() if is_given(source)]
    idle = dict(effects.without_effect(given, resolved.settings))
    return [
        Row(key, value, source, f"no effect {idle[key]}" if key in idle else "")
        for key, value, source in resolved.rows()
    ]


def _of_flags(call: typer.Context, defaults: Mapping[str, object]) -> list[Row]:
    places = o.origins(call)
    return [
        Row(key, defaults.get(key) if value is None else value, places.get(key, Place.DEFAULT), "")
        for key, value in ((key, call.params[key]) for key in FLAG_KEYS)
    ]


def _with_thinking(row: Row, thinking: Thinking) -> Row:
    """A row as it is once it is clear whether the answer thinks."""
    if row.key == "think":
        return replace(row, value=thinking.on, source=thinking.place or Place.DEFAULT)
    if row.key == "think_budget" and row.value is not None and thinking.budget is None:
        return replace(row, effect="no effect while think is off")
    return row


def _json(row: Row) -> dict[str, object]:
    value = row.value
    if isinstance(value, tuple):
        value = list(value)
    return {
        "key": row.key,
        "value": str(value) if isinstance(value, Path) else value,
        "source": row.source,
        "effect": row.effect or None,
    }
