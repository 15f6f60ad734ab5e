"""`clover-local pull`: a model's files from the hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from clover_local.cli import console
from clover_local.cli.options import JsonOpt, QuietOpt
from clover_local.errors import HubError
from clover_local.fetch.pull import fetch, remove_damaged
from clover_local.fetch.remote import Remote, find, some
from clover_local.hub import DEMO, HUB_ID, gguf_models
from clover_local.memory.sizes import shown

RepositoryArg = Annotated[
    str,
    typer.Argument(metavar="REPO", help="owner/name[@revision] on the hub.", show_default=False),
]
RevisionOpt = Annotated[
    str | None, typer.Option(metavar="R", help="Branch, tag or commit; default: main.")
]
IncludeOpt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only files of such names: '*Q4_K_M.gguf'; can be given several times.",
    ),
]


def pull(
    repository: RepositoryArg,
    revision: RevisionOpt = None,
    include: IncludeOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Fetch a model from the hub, and check its hashes; the same command continues after a stop.

    Weights (.safetensors, .gguf), configs, tokenizer and template are fetched: no pickle, no code.
    HF_HOME says where to, HF_ENDPOINT from where, HF_TOKEN (or `hf auth login`) who asks.
    """
    if repository == DEMO or os.path.isdir(os.path.expanduser(repository)):
        raise HubError(f"{repository} is on this machine already: pull takes a hub id, owner/name")
    match = HUB_ID.fullmatch(repository)
    if match is None:
        raise HubError(f"{repository!r} is no hub id: it is owner/name, as on the model's page")
    name, own = match["repository"], match["revision"]
    if own and revision and own != revision:
        raise typer.BadParameter(f"{repository} names another revision", param_hint="--revision")
    remote = find(name, revision or own, include=include or ())
    missing, free = remote.missing_bytes, _free_bytes(remote.root.parent)
    console.note(
        f"{name} @{remote.commit[:8]}: {len(remote.files)} files, {shown(remote.nbytes)}; "
        f"{shown(missing)} to fetch, {shown(free)} free on the disk of {remote.root.parent}"
    )
    if remote.left_out:
        console.note(f"note: not fetched: {some(remote.left_out)}")
    if missing > free:
        raise HubError(
            f"{name} needs {shown(missing)} more on the disk of {remote.root.parent}, which has "
            f"{shown(free)} free: free {shown(missing - free)}, or set HF_HOME to another disk"
        )
    damaged: tuple[str, ...] = ()
    try:
        if any(map(remote.has, remote.files)):
            with console.progress(f"checking what is here of {name}") as on_progress:
                damaged = remove_damaged(remote, on_progress=on_progress)
        if damaged:
            console.note(f"note: {some(damaged)}: damaged on the disk, fetched again")
        if all(map(remote.has, remote.files)):
            fetched = fetch(remote)  # names may be missing
        else:
            with console.progress(f"fetching {name}") as line:
                fetched = fetch(
                    remote,
                    on_progress=line,
                    on_check=lambda file, done, total: line(done, total, label=f"checking {file}"),
                    on_wait=lambda file: line.note(
                        f"waiting for another program that is fetching {file}"
                    ),
                )
    except KeyboardInterrupt:
        console.note("stopped: what was fetched is kept, and the same command continues")
        raise
    _show(remote, fetched, damaged, as_json=as_json)


def _show(remote: Remote, fetched: int, damaged: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        console.print_json(
            {
                "name": remote.name,
                "revision": remote.commit,
                "folder": str(remote.folder),
                "files": [
                    {"name": file.name, "bytes": file.nbytes, "hash": file.hash}
                    for file in remote.files
                ],
                "bytes": remote.nbytes,
                "fetched_bytes": fetched,
                "damaged": list(damaged),
            }
        )
        return
    console.text(f"{remote.folder}: {shown(remote.nbytes)}, all hashes agree")
    models = gguf_models([file.name for file in remote.files])
    if not models and not (remote.folder / "config.json").is_file():
        console.note(
            "note: it does not run without config.json, which is not among the files: fetch all "
            "of a model (no --include), or name another repository"
        )
        return
    model = str(remote.folder / models[0]) if len(models) > 1 else _id(remote)
    console.note(f"`clover-local chat {model}` runs it")


def _free_bytes(folder: Path) -> int:
    """Bytes that are free where `folder` is or will be."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def _id(remote: Remote) -> str:
    return remote.name if remote.revision is None else f"{remote.name}@{remote.revision}"
