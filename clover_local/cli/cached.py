"""`clover-local ls` and `rm`: the models in the hub's cache."""

import os
import sys
from typing import Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt
from clover_local.errors import HubError
from clover_local.hub import (
    DEMO,
    CachedModel,
    Unusable,
    cached_models,
    delete_cached,
    find_cached,
    find_unusable,
    unusable_models,
)
from clover_local.memory.sizes import shown

NameArg = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="As `ls` shows it: owner/name[@revision].", show_default=False
    ),
]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def ls(as_json: JsonOpt = False, quiet: QuietOpt = False) -> None:
    """List the models in the hub's cache."""
    models, unusable = cached_models(), unusable_models()
    if as_json:
        console.print_json(
            {
                "models": [_json(model) for model in models],
                "half_fetched": [_unusable_json(each) for each in unusable if each.is_half_fetched],
                "damaged": [_unusable_json(each) for each in unusable if not each.is_half_fetched],
            }
        )
    elif models or unusable:
        rows = [*map(_row, models), *map(_unusable_row, unusable)]
        console.show_table("Models", rows)
    else:
        console.text(f"no model is in the hub cache; `{DEMO}` comes with the package")


def rm(
    name: NameArg, yes: YesOpt = False, as_json: JsonOpt = False, quiet: QuietOpt = False
) -> None:
    """Remove a model from the hub's cache."""
    if name == DEMO:
        raise HubError(f"{DEMO} is part of the package: uninstall that to remove it")
    if os.path.exists(os.path.expanduser(name)):
        raise HubError(f"{name} is a folder or file of yours, not in the cache: remove it yourself")
    unusable = find_unusable(name)
    found = [] if unusable else find_cached(name)
    for row in [*map(_row, found), *map(_unusable_row, unusable)]:
        console.note("  ".join(row))
    if not yes:
        if not console.is_terminal(sys.stdin):
            raise HubError(f"rm {name} asks first, and nobody can answer here: pass --yes")
        typer.confirm(f"Remove {'it' if len(found) < 2 else 'them'}?", abort=True, err=True)
    for each in unusable:
        each.delete()
    freed = delete_cached(found) + sum(each.nbytes for each in unusable)
    if as_json:
        console.print_json(
            {
                "removed": [*(each.name for each in found), *(each.name for each in unusable)],
                "freed_bytes": freed,
            }
        )
    else:
        console.text(f"freed {shown(freed)}")


def _row(model: CachedModel) -> tuple[str, str, str, str, str]:
    return (
        model.name,
        f"@{model.revision[:8]}" + "".join(f" {ref}" for ref in model.refs),
        shown(model.nbytes),
        f"{model.changed:%Y-%m-%d}",
        "" if model.has_weights else "no weights",
    )


def _unusable_row(model: Unusable) -> tuple[str, str, str, str, str]:
    state = "half fetched: pull continues" if model.is_half_fetched else "damaged: rm removes it"
    return (model.name, "", shown(model.nbytes), "", state)


def _unusable_json(model: Unusable) -> dict[str, object]:
    return {"name": model.name, "bytes": model.nbytes, "folder": str(model.root)}


def _json(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "revision": model.revision,
        "refs": list(model.refs),
        "bytes": model.nbytes,
        "has_weights": model.has_weights,
        "changed": model.changed.isoformat(),
        "folder": str(model.folder),
    }
