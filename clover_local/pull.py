"""Weights from the hub, file by file: what is there counts, a stop loses nothing, hashes agree.

huggingface_hub finds the files, says their hashes and sizes, and lays out the cache. The bytes are
fetched here, because its own download begins a file anew after a stop: what has come of a blob
stays beside it as `HASH.incomplete` and is continued with an HTTP range.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.errors import HubError
from clover_local.files import replacing
from clover_local.hub import GGUF_SUFFIX, gguf_models, hub_errors

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

SUFFIXES = (".safetensors", ".json", ".jinja", GGUF_SUFFIX)
TOKENIZER_FILES = ("tokenizer.model", "merges.txt", "vocab.txt")
TRIES = 5  # of a connection that breaks before a byte has come
CHUNK_BYTES = 1 << 20
TIMEOUT = 30.0  # seconds without a byte

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PASSING = (429, 500, 502, 503, 504)
"""Answers that may be others a moment later."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; its hash is sha256 where the hub stores it apart, else git's sha1."""

    name: str
    nbytes: int
    hash: str
    is_large: bool

    def digest_of(self, path: Path, on_bytes: Callable[[int], None]) -> str:
        """The hash that the bytes in `path` have."""
        if self.is_large:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                on_bytes(len(chunk))
        return digest.hexdigest()


@dataclass(frozen=True)
class Remote:
    """A model on the hub in one revision, as far as it is wanted, and its place in the cache."""

    name: str  # owner/name
    revision: str | None  # as asked for: a branch, a tag, a hash
    commit: str
    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...]  # names of files that hold weights and are not wanted
    root: Path

    @property
    def folder(self) -> Path:
        """Where the files will be."""
        return self.root / "snapshots" / self.commit

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def blob(self, file: RemoteFile) -> Path:
        """Where the bytes of a file are once they are whole."""
        return self.root / "blobs" / file.hash

    def part(self, file: RemoteFile) -> Path:
        """Where they are until then."""
        return self.root / "blobs" / f"{file.hash}.incomplete"

    def place(self, file: RemoteFile) -> Path:
        """The blob, or where links are not supported the file itself."""
        pointer = self.folder / file.name
        return pointer if pointer.is_file() and not pointer.is_symlink() else self.blob(file)

    def has(self, file: RemoteFile) -> bool:
        """Whether a file is here in its length."""
        place = self.place(file)
        return place.exists() and _size(place) == file.nbytes

    def missing(self, file: RemoteFile) -> int:
        """Bytes of a file that are not here."""
        if self.has(file):
            return 0
        return max(0, file.nbytes - _size(self.part(file)))


def find(repository: str, revision: str | None, *, include: Sequence[str] = ()) -> Remote:
    """Asks the hub what a model has.

    Args:
        include: name patterns; none: weights, configs, tokenizer and template.

    Raises:
        HubError: the hub does not have it or does not give it, or nothing is left of it.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    with hub_errors(repository, revision):
        try:
            info = HfApi().model_info(
                repository, revision=revision, files_metadata=True, timeout=TIMEOUT
            )
        except HFValidationError:
            raise HubError(
                f"{repository!r} is no possible hub id: it is owner/name, as on the model's page"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise HubError(
                f"{constants.ENDPOINT} does not answer as a hub does: correct HF_ENDPOINT"
            ) from None
    every = _files(info)
    allowed = [file for file in every if _is_allowed(file.name)]
    wanted = _wanted(repository, allowed, include)
    chosen = {file.name for file in wanted}
    return Remote(
        name=repository,
        revision=revision,
        commit=str(info.sha),
        files=tuple(wanted),
        left_out=tuple(file.name for file in every if file.is_large and file.name not in chosen),
        root=Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model"),
    )


def _files(info: "ModelInfo") -> list[RemoteFile]:
    found = [
        RemoteFile(
            name=each.rfilename,
            nbytes=int((each.lfs.size if each.lfs else each.size) or 0),
            hash=str(each.lfs.sha256 if each.lfs else each.blob_id),
            is_large=each.lfs is not None,
        )
        for each in info.siblings or ()
    ]
    for file in found:
        if not _HASH.fullmatch(file.hash) or ".." in file.name.split("/"):
            raise HubError(
                f"the hub's list of {info.id} is damaged ({file.name!r} has the hash "
                f"{file.hash[:64]!r}): check HF_ENDPOINT"
            )
    return found


def _is_allowed(name: str) -> bool:
    """Whether a file holds weights as plain numbers, or describes them: no pickle, no code."""
    return name.endswith(SUFFIXES) or name.rpartition("/")[2] in TOKENIZER_FILES


def _wanted(
    repository: str, allowed: Sequence[RemoteFile], include: Sequence[str]
) -> list[RemoteFile]:
    """The files to have; of several .gguf files the user names one, since each is a model."""
    names = [file.name for file in allowed]
    if include:
        found = [file for file in allowed if any(fnmatch(file.name, each) for each in include)]
        if not found:
            raise HubError(
                f"{repository} has no file like {' '.join(include)} among {_some(names)}: "
                "correct --include"
            )
        return found
    if any(name.endswith(".safetensors") for name in names):
        return [file for file in allowed if not file.name.endswith(GGUF_SUFFIX)]
    models = gguf_models(names)
    if not models:
        raise HubError(
            f"{repository} has no .safetensors and no .gguf file: other formats may run code when "
            "they are loaded, and are not fetched"
        )
    if len(models) > 1:
        raise HubError(
            f"{repository} has {len(models)} models in .gguf files ({_some(models)}): say which, "
            f"such as --include {models[0]}"
        )
    return list(allowed)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def remove_damaged(
    remote: Remote, *, on_progress: Progress = lambda done, total: None
) -> tuple[str, ...]:
    """Reads the files that are here; those with another hash go, and their names come back.

    Args:
        on_progress: called with bytes read and bytes in all.
    """
    present = [file for file in remote.files if remote.place(file).exists()]
    meter = _Meter(on_progress, sum(file.nbytes for file in present))
    damaged = []
    for file in present:
        path = remote.place(file)
        if file.digest_of(path, meter.add) != file.hash:
            path.unlink()
            damaged.append(file.name)
    return tuple(damaged)


def fetch(
    remote: Remote,
    *,
    on_progress: Progress = lambda done, total: None,
    pause: float = 1.0,
) -> int:
    """Makes every file of `remote` be here whole; returns the bytes that were fetched.

    Args:
        on_progress: called with bytes fetched and bytes to fetch in all.
        pause: seconds before a broken connection is tried again, at first.

    Raises:
        HubError: the connection stays broken, the disk is full, the hub sends damaged files.
    """
    meter = _Meter(on_progress, sum(map(remote.missing, remote.files)))
    with hub_errors(remote.name, remote.revision):
        for file in remote.files:
            if not remote.has(file):
                with _locked(remote, file):
                    _fetch_whole(remote, file, meter, pause=pause)
        _lay_out(remote)
    return meter.done


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fetch_whole(remote: Remote, file: RemoteFile, meter: "_Meter", *, pause: float) -> None:
    """Fetches a file until its hash is right.

    One that is damaged, maybe since an earlier run, is fetched once more from its start.

    Raises:
        HubError: it is damaged again.
    """
    if remote.has(file):  # another process was faster
        return
    part, digest = remote.part(file), ""
    for _ in range(2):
        _fetch(remote, file, meter, pause=pause)
        digest = file.digest_of(part, lambda count: None)
        if digest == file.hash:
            part.replace(remote.blob(file))
            return
        part.unlink()
        meter.total += file.nbytes
    raise HubError(
        f"{file.name} of {remote.name} came damaged twice (its hash is {digest[:12]}..., the hub "
        f"says {file.hash[:12]}...): try again later, or another network; what is whole is kept"
    )


def _fetch(remote: Remote, file: RemoteFile, meter: "_Meter", *, pause: float) -> None:
    """Fetches what is missing of a file; a connection that breaks is tried again.

    Raises:
        HubError: the file ends too early.
        TransportError, HfHubHTTPError: `TRIES` times in a row not a byte came.
    """
    part, tries = remote.part(file), 0
    while True:
        before = _size(part)
        failure = _attempt(remote, file, meter)
        after = _size(part)
        if failure is None and after >= file.nbytes:
            return
        tries = 1 if after > before else tries + 1
        if tries == TRIES:
            raise failure or HubError(
                f"{file.name} of {remote.name} ends after {after} of {file.nbytes} bytes: "
                "try again later"
            )
        time.sleep(pause * tries)


def _attempt(remote: Remote, file: RemoteFile, meter: "_Meter") -> Exception | None:
    """One try; returns what broke it if that may pass."""
    from httpx2 import TransportError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        _stream(remote, file, meter)
    except TransportError as error:
        return error
    except HfHubHTTPError as error:
        if error.response.status_code not in _PASSING:
            raise
        return error
    return None


def _stream(remote: Remote, file: RemoteFile, meter: "_Meter") -> None:
    """One request for what is missing of a file, appended to what is there."""
    from huggingface_hub import (
        constants,
        get_session,
        get_token,
        hf_hub_url,
        hf_raise_for_status,
    )

    part = remote.part(file)
    start = _size(part)
    if start >= file.nbytes:
        if not part.exists():
            part.touch()  # an empty file
        return
    headers = {"Accept-Encoding": "identity"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if start:
        headers["Range"] = f"bytes={start}-"
    url = hf_hub_url(remote.name, file.name, revision=remote.commit)
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        continues = response.status_code == 206
        if not continues:
            meter.total += start
        with part.open("ab" if continues else "wb") as out:
            for chunk in response.iter_bytes():  # as it comes: what a chunk lacks would be lost
                out.write(chunk)
                meter.add(len(chunk))


def _lay_out(remote: Remote) -> None:
    """Gives the files their names, as huggingface_hub does, and the revision its commit."""
    from huggingface_hub import hf_hub_download

    # The config comes last: without it nobody takes the folder for a model.
    for file in sorted(remote.files, key=lambda file: file.name == "config.json"):
        hf_hub_download(remote.name, file.name, revision=remote.commit)
    name = remote.revision or "main"
    if name != remote.commit:
        ref = remote.root / "refs" / name
        ref.parent.mkdir(parents=True, exist_ok=True)
        with replacing(ref) as out:
            out.write(remote.commit.encode())


@contextmanager
def _locked(remote: Remote, file: RemoteFile) -> Iterator[None]:
    """One process at a time fetches a blob; the lock is that of huggingface_hub."""
    from filelock import FileLock

    lock = remote.root.parent / ".locks" / remote.root.name / f"{file.hash}.lock"
    for folder in (lock.parent, remote.blob(file).parent):
        os.makedirs(folder, exist_ok=True)
    with FileLock(lock):
        yield


class _Meter:
    """Counts bytes and reports them; `total` may grow."""

    def __init__(self, report: Progress, total: int) -> None:
        self._report = report
        self.total = total
        self.done = 0

    def add(self, count: int) -> None:
        """More bytes are done."""
        self.done += count
        self._report(self.done, self.total)
