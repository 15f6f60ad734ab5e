"""The settings of a recorded run, for a model that may be another or a later one. No torch."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from clover_local.decoding.keys import KEYS
from clover_local.decoding.settings import ResolvedSettings, Settings
from clover_local.errors import TraceError
from clover_local.files import as_token_id, as_token_ids
from clover_local.traces.read import Header


def recorded_settings(header: Header, resolved: ResolvedSettings) -> Settings:
    """The settings of a recorded run; what the trace does not say is as in `resolved`.

    Raises:
        TraceError: settings that this model or this version does not have.
        SettingsError: a value out of range.
    """
    own, recorded = resolved.settings, dict(header.settings)
    for name in ("mask_token_id", "vocab_size"):
        if recorded.pop(name, None) != getattr(own, name):
            raise TraceError(
                f"the trace has a model of another {name} than {getattr(own, name)}: pass the "
                "model that it was made with as --model"
            )
    unknown = recorded.keys() - {each.name for each in fields(Settings)}
    if unknown:
        raise TraceError(
            f"the trace has the settings {', '.join(sorted(unknown))} that this version lacks: "
            f"replay it with clover-local {header.versions.get('clover_local')}"
        )
    given = {name: value for name, value in recorded.items() if name in KEYS}
    settings = resolved.with_values(given, source="trace").settings
    return replace(settings, **_model_settings(recorded))


def _model_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that were the model's; they make a trace independent of its later files."""
    try:
        ids = {
            name: as_token_ids(recorded[name])
            for name in ("stop_ids", "suppress_tokens")
            if name in recorded
        }
        end = recorded.get("think_end_token_id")
        return {**ids, "think_end_token_id": None if end is None else as_token_id(end)}
    except (TypeError, ValueError) as error:
        raise TraceError(f"the trace's settings are damaged ({error}): record it anew") from None
