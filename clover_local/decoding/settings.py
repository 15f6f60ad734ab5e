"""Every decoding setting of a run: its name, range and default, and where its value came from.

Names are those of the command line's flags, of `/set` and of the API's fields (`-` and `_` are the
same). The checkpoint's `generation_config.json` gives the defaults of the response controls,
because they are part of the model. Needs no torch: flags are checked before weights are loaded.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from clover_local.config import GenerationConfig, ModelConfig
from clover_local.decoding.keys import KEYS
from clover_local.errors import SettingsError

GAMMAS = {"entropy_bound": 0.1, "credit": 0.2}
"""`sampler_gamma`, by rule, where it is not given."""
CERTAIN_BIAS = 100.0
"""Logits that no other token is ahead by."""


class Place(StrEnum):
    """Where a value may be from.

    Other places have names of their own: a config file its path, a variable, a saved session.
    """

    DEFAULT = "default"
    CONFIG = "config.json"
    GENERATION = "generation_config.json"
    ARGUMENT = "argument"
    FLAG = "flag"
    SET = "/set"
    REGEN = "/regen"
    THINK = "/think"
    THINKING = "/thinking"
    WATCH = "/watch"
    SYSTEM = "/system"
    MODEL = "/model"


_OF_MODEL = frozenset({Place.DEFAULT, Place.CONFIG, Place.GENERATION})


def is_given(place: str) -> bool:
    """Whether a value from there is a user's, and not the model's own."""
    return place not in _OF_MODEL


def is_asked(place: str) -> bool:
    """Whether a user gave a value from there for this run: no general default, no old session."""
    return place in frozenset(Place) - _OF_MODEL


def named(key: str, place: str) -> str:
    """A key as the user has spelled it: as a flag, or by its name."""
    return f"--{key.replace('_', '-')}" if place == Place.FLAG else key


@dataclass(frozen=True)
class Settings:
    """What a run obeys.

    The first five fields are the model's, the last is the loop guard's; all others are the user's
    (`KEYS`).
    """

    mask_token_id: int
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    think_end_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()

    mode: str = "denoise"
    max_new_tokens: int = 2048
    min_new_tokens: int = 0
    threshold: float = 0.95
    sampler: str = "threshold"
    sampler_factor: float = 1.0
    sampler_gamma: float | None = None  # None: the rule's own
    sampler_margin: float = 0.9
    sampler_steps: int = 8
    sampler_k: int = 1
    sampler_kl: float = 0.01
    sampler_history: int = 2
    sampler_threshold: float = 0.9
    sampler_alpha: float = 0.7
    sampler_beta: float = 0.8
    sampler_low: float = 0.4
    sampler_threshold_decay: float = 0.0
    sampler_min_per_pass: int = 0
    sampler_max_per_pass: int = 0
    sampler_finish_gap: bool = False
    draft_width: int = 16
    accept: str = "typical"
    accept_ratio: float = 0.9
    accept_delta: float = 0.6
    auto: tuple[str, ...] = ("denoise", "draft", "ar")  # the first one runs first
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    suppress: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    length_penalty: float = 0.0
    length_penalty_start: int = 8192
    length_penalty_window: int = 8192
    think_end_bias: float = 0.0
    think_end_start: int = 4096
    think_end_window: int = 4096
    in_block_repetition: bool = False
    no_repeat_ngram: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed: int = 2
    dry_breakers: tuple[int, ...] = ()
    eos_order: bool = False
    loop_guard: str = "off"

    guarded: bool = False  # whether the guard has stepped in, and these settings are not as given

    @property
    def running_modes(self) -> tuple[str, ...]:
        """The modes that may produce a token."""
        return self.auto if self.mode == "auto" else (self.mode,)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids never picked, in any mode: MASK, the checkpoint's suppressed ids, the user's."""
        return tuple(sorted({self.mask_token_id, *self.suppress_tokens, *self.suppress}))

    @property
    def gamma(self) -> float:
        """The knob of that name, of the rule in use."""
        given = self.sampler_gamma
        return GAMMAS.get(self.sampler, 0.0) if given is None else given

    @property
    def has_own_controls(self) -> bool:
        """Whether a control beyond the release's may change a logit."""
        return self.min_new_tokens > 0 or self.dry_multiplier > 0 or self.guarded

    @property
    def remembers_passes(self) -> bool:
        """Whether the rule keeps a distribution for each row from pass to pass."""
        return self.sampler in ("klass", "credit")

    @property
    def picks_blocks_in_torch(self) -> bool:
        """Whether plain PyTorch picks the rows of a block, wherever the logits are."""
        return "denoise" in self.running_modes and (
            self.remembers_passes or self.dry_multiplier > 0
        )

    @property
    def ends_thinking_once(self) -> bool:
        """Whether a bias makes the end of the thinking certain, in many rows of a pass at once."""
        return self.think_end_token_id is not None and self.think_end_bias >= CERTAIN_BIAS

    @property
    def defers_rows(self) -> bool:
        """Whether a row that the rule accepts may have to wait."""
        wanted = (self.in_block_repetition, self.no_repeat_ngram, self.eos_order)
        return any(wanted) or self.ends_thinking_once

    @property
    def plain_threshold(self) -> bool:
        """Whether the release's rule alone decides which rows are fixed."""
        changed = (
            self.sampler_threshold_decay,
            self.sampler_min_per_pass,
            self.sampler_max_per_pass,
            self.sampler_finish_gap,
            self.has_own_controls,
            self.defers_rows,
        )
        return self.sampler == "threshold" and not any(changed)


@dataclass(frozen=True)
class ResolvedSettings:
    """Settings, and for each field the name of the place its value came from."""

    settings: Settings
    sources: dict[str, str]

    def with_value(self, key: str, text: str, *, source: str = Place.SET) -> "ResolvedSettings":
        """The same settings with `key` read from `text`.

        Raises:
            SettingsError: an unknown key (names the nearest known one) or a value out of range.
        """
        return self.with_values({key: text.strip()}, source=source)

    def with_values(
        self, values: Mapping[str, object], *, source: str | Mapping[str, str]
    ) -> "ResolvedSettings":
        """The same settings with every given value; None means "not given".

        Args:
            source: the place that all values are from, or the place of each.

        Raises:
            SettingsError: as `with_value`.
        """
        changes: dict[str, Any] = {}
        sources = dict(self.sources)
        places = dict.fromkeys(values, source) if isinstance(source, str) else source
        for name, value in values.items():
            key = known_key(name)
            if value is None:
                continue
            try:
                changes[key] = KEYS[key].convert(value)
            except (TypeError, ValueError):
                raise SettingsError(
                    f"{named(key, places[name])} is {value!r}: expected {KEYS[key].expected}"
                ) from None
            sources[key] = places[name]
        settings = replace(self.settings, **changes)
        _refuse_without_effect(settings, changes, sources)
        return ResolvedSettings(settings, sources)

    def reset(self, keys: Collection[str], *, to: "ResolvedSettings") -> "ResolvedSettings":
        """The same settings with the values and sources that `keys` have in `to`."""
        values = {key: getattr(to.settings, key) for key in keys}
        sources = {key: to.sources[key] for key in keys}
        return ResolvedSettings(replace(self.settings, **values), {**self.sources, **sources})

    def rows(self) -> list[tuple[str, object, str]]:
        """(key, value, source) for each of `KEYS`, in their order: what `/show` prints."""
        values = {key: getattr(self.settings, key) for key in KEYS}
        if values["sampler_gamma"] is None and self.settings.sampler in GAMMAS:
            values["sampler_gamma"] = self.settings.gamma
        return [(key, value, self.sources[key]) for key, value in values.items()]


def resolve(
    config: ModelConfig,
    generation: GenerationConfig,
    overrides: Mapping[str, object],
    *,
    source: str | Mapping[str, str] = Place.FLAG,
) -> ResolvedSettings:
    """The model's settings with the user's `overrides` on top (None means "not given").

    Args:
        source: the place that all overrides are from, or the place of each.

    Raises:
        SettingsError: an unknown key, a value out of range, or one without effect on this model.
    """
    values: dict[str, Any] = {"threshold": config.threshold}
    sources: dict[str, str] = {**dict.fromkeys(KEYS, Place.DEFAULT), "threshold": Place.CONFIG}
    for name, key in KEYS.items():
        if key.generation_key is not None:
            values[name] = getattr(generation, key.generation_key)
            if key.generation_key in generation.given:
                sources[name] = Place.GENERATION
    stops_given = generation.given & {"eos_token_id", "stop_token_ids", "pad_token_id"}
    sources |= {
        "mask_token_id": Place.CONFIG,
        "vocab_size": Place.CONFIG,
        "stop_ids": Place.GENERATION if stops_given else Place.CONFIG,
        "think_end_token_id": Place.GENERATION,
        "suppress_tokens": Place.GENERATION,
    }
    settings = Settings(
        mask_token_id=config.mask_token_id,
        vocab_size=config.vocab_size,
        stop_ids=generation.stop_ids,
        think_end_token_id=generation.dllm_think_end_token_id,
        suppress_tokens=generation.suppress_tokens,
        **values,
    )
    return ResolvedSettings(settings, sources).with_values(overrides, source=source)


def known_key(name: str) -> str:
    """The one of `KEYS` that is meant by a flag or by a key with `-` for `_`.

    Raises:
        SettingsError: none of them; names the nearest.
    """
    key = name.strip().removeprefix("--").replace("-", "_")
    if key in KEYS:
        return key
    near = difflib.get_close_matches(key, KEYS, n=1)
    remedy = f"did you mean {near[0]}?" if near else "known are " + ", ".join(KEYS)
    raise SettingsError(f"unknown setting {name!r}: {remedy}")


def _refuse_without_effect(
    settings: Settings, changes: Mapping[str, object], sources: Mapping[str, str]
) -> None:
    """A value that the user gave and that this model cannot obey is refused, never ignored."""

    def placed(key: str) -> str:
        return key if is_asked(sources[key]) else f"{key} (from {sources[key]})"

    if changes.get("think_end_bias") and settings.think_end_token_id is None:
        raise SettingsError(
            f"{placed('think_end_bias')} needs dllm_think_end_token_id in generation_config.json, "
            "which this model lacks: leave think_end_bias at 0"
        )
    for key in ("length_penalty", "min_new_tokens", "eos_order"):
        if changes.get(key) and not settings.stop_ids:
            off = "off" if key == "eos_order" else 0
            raise SettingsError(
                f"{placed(key)} needs a stop id, which this model lacks: leave {key} at {off}"
            )
    for key in ("suppress", "dry_breakers"):
        for token in getattr(settings, key):
            if token >= settings.vocab_size:
                raise SettingsError(
                    f"{placed(key)} names the token id {token}: ids of this model end at "
                    f"{settings.vocab_size - 1}"
                )
    least, most = settings.sampler_min_per_pass, settings.sampler_max_per_pass
    if most and least > most:
        raise SettingsError(
            f"{placed('sampler_min_per_pass')} is {least} and "
            f"{placed('sampler_max_per_pass')} {most}: lower the first"
        )
