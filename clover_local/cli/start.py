"""Model and settings of a command that runs a model: files and flags first, weights after that."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.cli import console, effects
from clover_local.cli.budget import require_end, with_budget
from clover_local.decoding.settings import Place, ResolvedSettings, Settings, is_asked, resolve
from clover_local.errors import concerning
from clover_local.hub import DEMO

if TYPE_CHECKING:
    from clover_local.decoding.trace import Trace
    from clover_local.placement import MemoryOptions
    from clover_local.session import OpenModel, Session


def open_model(
    name: str,
    given: Mapping[str, object],
    *,
    origins: Mapping[str, str] | None = None,
    template_flags: Mapping[str, object],
    bypass: str | None = None,
    think_budget: int | None = None,
    strict: bool,
) -> tuple[OpenModel, ResolvedSettings]:
    """The model's files, checked, and its settings with the given ones on top.

    What a user asked for and has no effect is noted, or with `strict` an error; general defaults
    (a config file's, the environment's) are not.

    Args:
        origins: where each of `given` is from; None: they are flags.
        template_flags: flags that only the chat template reads; None = not given.
        bypass: the flag that replaces the template, if there is one.
        think_budget: most tokens of thinking; what is `given` counts more.
    """
    from clover_local import session

    with concerning("model"):
        opened = session.open_model(name)
    for note in opened.checkpoint.notes:
        console.note(f"note: {note}")
    if think_budget is not None:
        require_end(opened.generation.dllm_think_end_token_id, f"--think-budget {think_budget}")
        given, origins = with_budget(given, origins or {}, think_budget)
    resolved = resolve(opened.config, opened.generation, given, source=origins or Place.FLAG)
    asked = [key for key in given if is_asked(resolved.sources[key])]
    effects.report(
        effects.without_effect(asked, resolved.settings)
        + effects.without_template(
            [flag for flag, value in template_flags.items() if value is not None],
            bypass=bypass,
            can_think=opened.tokenizer.can_think,
        ),
        places={**(origins or {}), **resolved.sources},
        strict=strict,
    )
    return opened, resolved


def load(
    opened: OpenModel,
    settings: Settings,
    *,
    context: int | None,
    device: str | None,
    dtype: str | None,
    memory: MemoryOptions,
    origins: Mapping[str, str] | None = None,
    strict: bool,
) -> Session:
    """The model in memory, with progress on stderr; says where its experts are.

    Memory flags without effect are noted, or with `strict` an error, before anything is read.

    Args:
        origins: where the memory options are from, by name; None: they are flags.
    """
    from clover_local import session

    placement = session.plan_memory(
        opened, context=context, device=device, dtype=dtype, memory=memory, settings=settings
    )
    idle = placement.without_effect()
    places = origins or {}
    asked = [(name, why) for name, why in idle if is_asked(places.get(name, Place.FLAG))]
    effects.report(asked, places=places, strict=strict)
    if placement.line is not None:
        console.note(placement.line)
    notes: list[str] = []
    loading = True  # a note would tear the progress bar apart
    with console.progress(f"loading {opened.name}") as on_progress:
        loaded = session.load_placed(
            opened,
            settings,
            placement,
            on_progress=on_progress,
            on_note=lambda line: notes.append(line) if loading else console.note(line),
        )
        loading = False
    for line in [*notes, *filter(None, [loaded.memory_gap()])]:
        console.note(f"note: {line}")
    if settings.temperature > 0:
        console.note(f"seed {settings.seed}")
    return loaded


def trace(opened: OpenModel, path: Path | None) -> AbstractContextManager[Trace | None]:
    """The trace to write to `path`; none without a path."""
    if path is None:
        return nullcontext()
    from clover_local.decoding.trace import Trace
    from clover_local.session import fingerprint

    where = Path(os.path.expanduser(opened.name))  # as `hub.locate` finds it
    model = str(where.resolve()) if opened.name != DEMO and where.exists() else opened.name
    return Trace(path, model_hash=fingerprint(opened), model=model)
