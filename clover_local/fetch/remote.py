"""A model on the hub: its files with hashes and sizes, how many are wanted, how much is here.

The hub's answer is read here field by field: whatever HF_ENDPOINT names may say anything.
"""

import hashlib
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from clover_local.errors import ConfigError, HubError
from clover_local.files import as_object, as_objects, as_text
from clover_local.hub import GGUF_SUFFIX, gguf_models, hub_errors

SUFFIXES = (".safetensors", ".json", ".jinja", GGUF_SUFFIX)
TOKENIZER_FILES = ("tokenizer.model", "merges.txt", "vocab.txt")
CHUNK_BYTES = 1 << 20
TIMEOUT = 30.0  # seconds without a byte
LARGEST_FILE = 1 << 60  # bytes
LONGEST_NAME = 255  # bytes of a part of a path, on all common file systems

Value = TypeVar("Value")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_NO_NAME = re.compile(r"\\|^[A-Za-z]:")  # of Windows: a folder, a drive


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository; its hash is sha256 where the hub stores it apart, else git's sha1."""

    name: str
    nbytes: int
    hash: str

    @property
    def is_stored_apart(self) -> bool:
        """Whether it is no part of the git repository, as files of weights are not."""
        return _SHA256.fullmatch(self.hash) is not None

    def digest_of(self, path: Path, on_bytes: Callable[[int], None]) -> str:
        """The hash of that kind that the bytes in `path` have."""
        if self.is_stored_apart:
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
    def distinct(self) -> tuple[RemoteFile, ...]:
        """The files without those whose content another one has: they share a place on the disk."""
        return tuple({file.hash: file for file in reversed(self.files)}.values())[::-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all files on the disk."""
        return sum(file.nbytes for file in self.distinct)

    @property
    def missing_bytes(self) -> int:
        """Bytes of all files that are not here."""
        return sum(map(self.missing, self.distinct))

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
        return place.exists() and size_of(place) == file.nbytes

    def missing(self, file: RemoteFile) -> int:
        """Bytes of a file that are not here."""
        if self.has(file):
            return 0
        return max(0, file.nbytes - size_of(self.part(file)))


def find(repository: str, revision: str | None, *, include: Sequence[str] = ()) -> Remote:
    """Asks the hub what a model has.

    Args:
        include: name patterns; none: weights, configs, tokenizer and template.

    Raises:
        HubError: the hub does not have it or does not give it, or nothing is left of it.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        commit, entries = _read(_answer(repository, revision))
    except ConfigError as error:
        raise HubError(
            f"{constants.ENDPOINT} does not answer as a hub does ({error}): correct HF_ENDPOINT"
        ) from None
    try:
        every = _read_files(entries)
    except ConfigError as error:
        raise HubError(
            f"the list of files that {constants.ENDPOINT} has of {repository} is damaged "
            f"({error}): nothing is fetched; correct HF_ENDPOINT, or tell the model's owner"
        ) from None
    allowed = [file for file in every if _is_allowed(file.name)]
    wanted = _wanted(repository, allowed, include)
    chosen = {file.name for file in wanted}
    return Remote(
        name=repository,
        revision=revision,
        commit=commit,
        files=tuple(wanted),
        left_out=tuple(
            file.name for file in every if file.is_stored_apart and file.name not in chosen
        ),
        root=Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model"),
    )


def _answer(repository: str, revision: str | None) -> Mapping[str, Any]:
    """What the hub says of a model.

    Raises:
        HubError: it does not have it, or does not give it.
        ConfigError: it says what no hub does.
    """
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.errors import HFValidationError

    try:
        hf_hub_url(repository, "config.json")  # checks the id
    except HFValidationError:
        raise HubError(
            f"{repository!r} is no possible hub id: it is owner/name, as on the model's page"
        ) from None
    url = f"{constants.ENDPOINT}/api/models/{repository}"
    if revision is not None:
        url += f"/revision/{quote(revision, safe='')}"
    with hub_errors(repository, revision):
        response = get_session().get(
            url, headers=token_header(), params={"blobs": True}, timeout=TIMEOUT
        )
        hf_raise_for_status(response)
    try:
        return as_object(response.json())
    except (ValueError, TypeError, RecursionError):  # no UTF-8, no JSON, no object
        raise ConfigError("no JSON object") from None


def token_header() -> dict[str, str]:
    """What says to the hub who asks, if there is a token."""
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _read(answer: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """A model's commit, and its list of files.

    Raises:
        ConfigError: a field is missing, or is none of a hub.
    """
    commit = _field("its answer", answer, "sha", _as_sha1)
    entries = [] if answer.get("siblings") is None else answer["siblings"]
    return commit, _field("its answer", {"siblings": entries}, "siblings", as_objects)


def _read_files(entries: Sequence[Mapping[str, Any]]) -> list[RemoteFile]:
    """The files of the list, each once.

    Raises:
        ConfigError: a field is missing or none of a hub, or two files cannot lie side by side.
    """
    files: dict[str, RemoteFile] = {}
    for number, entry in enumerate(entries):
        file = _read_file(f"its file {number}", entry)
        if files.setdefault(file.name, file) != file:
            raise ConfigError(f"its file {number}: {reprlib.repr(file.name)} is there twice")
    for name in files:
        folders = (name[:end] for end, character in enumerate(name) if character == "/")
        for folder in folders:
            if folder in files:
                raise ConfigError(f"{reprlib.repr(folder)} is a file and a folder")
    return list(files.values())


def _read_file(source: str, entry: Mapping[str, Any]) -> RemoteFile:
    """One file: of a large one its `lfs` counts, since the rest describes a pointer to it."""
    name = _field(source, entry, "rfilename", _as_name)
    if entry.get("lfs") is None:
        hash = _field(source, entry, "blobId", _as_sha1)
        return RemoteFile(name, _field(source, entry, "size", _as_count), hash)
    lfs = _field(source, entry, "lfs", as_object)
    hash = _field(f"{source}, lfs", lfs, "sha256", _as_sha256)
    return RemoteFile(name, _field(f"{source}, lfs", lfs, "size", _as_count), hash)


def _field(
    source: str, entry: Mapping[str, Any], key: str, convert: Callable[[Any], Value]
) -> Value:
    value = entry.get(key)
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {key!r} is {reprlib.repr(value)}, expected {error}") from None


def _as_name(value: Any) -> str:
    """A path that stays below the model's folder on every system; an absolute one has no parts."""
    parts = as_text(value).split("/")
    if {"", "..", "."} & {*parts} or not value.isprintable() or _NO_NAME.search(value):
        raise ValueError("the path of a file below the model's folder")
    if max(len(part.encode()) for part in parts) > LONGEST_NAME:
        raise ValueError(f"parts of at most {LONGEST_NAME} bytes")
    return str(value)


def _as_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_FILE:
        raise TypeError("a number of bytes")
    return value


def _as_sha1(value: Any) -> str:
    if not _SHA1.fullmatch(as_text(value)):
        raise ValueError("40 hexadecimal digits")
    return str(value)


def _as_sha256(value: Any) -> str:
    if not _SHA256.fullmatch(as_text(value)):
        raise ValueError("64 hexadecimal digits")
    return str(value)


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
                f"{repository} has no file like {' '.join(include)} among {some(names)}: "
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
            f"{repository} has {len(models)} models in .gguf files ({some(models)}): say which, "
            f"such as --include {models[0]}"
        )
    return list(allowed)


def some(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
