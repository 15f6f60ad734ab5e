"""Where a model lies: a folder, the bundled demo model, or a hub id in huggingface_hub's cache.

The cache is asked before the network, so that a model that is complete on this machine starts
without it. To have a newer revision of a cached model, name it: `owner/name@revision`.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from clover_local.errors import CheckpointError, HubError

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from huggingface_hub import HFCacheInfo

DEMO = "demo"
GGUF_SUFFIX = ".gguf"
DESCRIPTION_FILES = ("*.json", "*.jinja")
MODEL_FILES = (*DESCRIPTION_FILES, "*.safetensors")

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_LATER_SPLIT = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_BESIDE_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True)
class CachedModel:
    """A model in the hub's cache, in one revision."""

    name: str  # owner/name
    revision: str  # 40 hexadecimal digits
    refs: tuple[str, ...]  # branches and tags that point to it
    nbytes: int  # files that other revisions share count too
    has_weights: bool
    changed: datetime
    folder: Path


@dataclass(frozen=True)
class Unusable:
    """A folder of a model in the hub's cache of which no revision can be used."""

    name: str
    nbytes: int  # 0 of a link: what it points to stays
    root: Path
    is_half_fetched: bool
    """A pull has begun it and continues it; else it is damaged."""

    def delete(self) -> None:
        """Removes what is there of it.

        Raises:
            HubError: a pull is fetching it, or it may not be removed.
        """
        from filelock import Timeout

        with ExitStack() as held:
            for part in self.root.glob("blobs/*.incomplete"):
                try:
                    held.enter_context(blob_lock(self.root, part.stem).acquire(blocking=False))
                except Timeout:
                    raise HubError(
                        f"a pull is fetching {self.name} just now: stop it (Ctrl-C) first"
                    ) from None
            with _removal_errors(self.root):
                if self.root.is_symlink() or not self.root.is_dir():
                    self.root.unlink()
                else:
                    shutil.rmtree(self.root)


def blob_lock(root: Path, name: str) -> "BaseFileLock":
    """The lock on a blob of the model at `root` in the cache; that of the hub's client too."""
    from filelock import FileLock

    lock = root.parent / ".locks" / root.name / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(lock)


def cached_models() -> list[CachedModel]:
    """The models in the hub's cache, by name, the newest revision first."""
    scanned = _scanned()
    found = [
        CachedModel(
            name=repository.repo_id,
            revision=revision.commit_hash,
            refs=tuple(sorted(revision.refs)),
            nbytes=revision.size_on_disk,
            has_weights=any(
                file.file_name.endswith((".safetensors", GGUF_SUFFIX)) for file in revision.files
            ),
            changed=datetime.fromtimestamp(revision.last_modified),
            folder=revision.snapshot_path,
        )
        for repository in (scanned.repos if scanned else ())
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]
    return sorted(found, key=lambda model: (model.name, -model.changed.timestamp()))


def unusable_models() -> list[Unusable]:
    """The models that a pull has begun and not finished, and the damaged ones, by name.

    Damaged are those that the hub's client does not read: files or a commit that a link or a ref
    points to are missing.
    """
    from huggingface_hub import constants

    scanned = _scanned()
    usable = {repository.repo_path for repository in (scanned.repos if scanned else ())}
    found = []
    for root in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        blobs = [path for path in root.glob("blobs/*") if path.is_file()]
        is_half_fetched = bool(blobs) and not any(root.glob("snapshots/*"))
        if is_half_fetched or root not in usable:
            name = root.name.removeprefix("models--").replace("--", "/", 1)
            nbytes = 0 if root.is_symlink() else sum(path.stat().st_size for path in blobs)
            found.append(Unusable(name, nbytes, root, is_half_fetched))
    return found


def find_unusable(model: str) -> list[Unusable]:
    """What is there of a model `owner/name[@revision]` that cannot be used.

    It has no revision, so any is meant.
    """
    return [each for each in unusable_models() if each.name == model.partition("@")[0]]


def find_cached(model: str) -> list[CachedModel]:
    """The cached revisions that `model` names: `owner/name`, or one of them with `@revision`.

    A revision may be a branch, a tag, or the first digits of its hash.

    Raises:
        HubError: there is none; says which there are.
    """
    name, _, revision = model.partition("@")
    cached = cached_models()
    found = [
        each
        for each in cached
        if each.name == name
        and (not revision or revision in each.refs or each.revision.startswith(revision))
    ]
    if not found:
        names = {each.name for each in cached} | {each.name for each in unusable_models()}
        known = ", ".join(sorted(names)) or "none"
        raise HubError(f"{model} is not in the hub cache: there are {known}")
    return found


def delete_cached(models: Sequence[CachedModel]) -> int:
    """Removes revisions from the hub's cache; returns the bytes that are free then.

    Files that a revision shares with another one stay, and so does what a link in the place of
    the model's folder points to.

    Raises:
        HubError: they may not be removed.
    """
    kept = {model.folder.parents[1] for model in cached_models() if model not in models}
    for root in {model.folder.parents[1] for model in models} - kept:
        if root.is_symlink():
            with _removal_errors(root):
                root.unlink()
    names = {model.name for model in models if model.folder.exists()}
    scanned = _scanned()
    if scanned is None or not names:
        return 0
    # The client goes by hash alone, and a copied repository has those of its source.
    own = replace(scanned, repos=frozenset(r for r in scanned.repos if r.repo_id in names))
    strategy = own.delete_revisions(*(model.revision for model in models))
    with _removal_errors(models[0].folder.parents[2]):
        strategy.execute()
        if left := [model.folder for model in models if model.folder.exists()]:
            # The client passes over what it may not remove.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(left[0]))
    return strategy.expected_freed_size


@contextmanager
def _removal_errors(path: Path) -> Iterator[None]:
    """Within it, what may not be removed at `path` or below is a HubError."""
    try:
        yield
    except OSError as error:
        raise HubError(
            f"{error.filename or path} cannot be removed ({error.strerror or error}): check its "
            "permissions"
        ) from None


def _scanned() -> "HFCacheInfo | None":
    """What is in the cache; None where there is no cache.

    Raises:
        HubError: it is no folder, or may not be read.
    """
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    folder = Path(constants.HF_HUB_CACHE)
    if folder.exists() and not folder.is_dir():
        raise HubError(f"{folder} is no folder: set HF_HOME to one, or move that file away")
    try:
        return scan_cache_dir(folder)
    except CacheNotFound:
        return None
    except OSError as error:
        raise HubError(
            f"{error.filename or folder} in the hub cache cannot be read "
            f"({error.strerror or error}): check its permissions, or set HF_HOME to another folder"
        ) from None


def locate(model: str, *, files: Sequence[str] = MODEL_FILES) -> Path:
    """The folder of `model`: a folder, `demo`, a hub id `owner/name[@revision]`; or a .gguf file.

    A folder comes before a hub id of the same spelling; `demo` is always the bundled model and
    `./demo` a folder. `files` are the name patterns to fetch; what is cached is not fetched again.

    Raises:
        CheckpointError: neither a folder nor a hub id.
        HubError: the hub does not have it, or cannot be reached.
    """
    if model == DEMO:
        return Path(__file__).parent / "demo"
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.isfile(path) and path.endswith(GGUF_SUFFIX):
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(
            f"{model} is a file: pass the folder that holds config.json and the weights, or a "
            f"{GGUF_SUFFIX} file"
        )
    if path.endswith(GGUF_SUFFIX):
        raise CheckpointError(f"there is no file {model!r}: check its name and its folder")
    match = HUB_ID.fullmatch(model)
    if match is None:
        raise CheckpointError(
            f"there is no folder {model!r}: pass the folder that holds the model, "
            f"a hub id such as owner/name, or {DEMO!r}"
        )
    return _find_on_hub(match["repository"], match["revision"], files)


def gguf_models(names: Sequence[str]) -> list[str]:
    """Of the .gguf files of a repository those to open as a model: of a split one its first."""
    from clover_local.gguf.diffusion import SUFFIX as SIDECAR

    return sorted(
        name
        for name in names
        if name.endswith(GGUF_SUFFIX)
        and not name.endswith(SIDECAR)
        and not _BESIDE_MODEL.search(name)
        and not _LATER_SPLIT.search(name)
    )


def _find_on_hub(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(repository, revision, files, local_files_only=True)
        if (folder / "config.json").is_file():
            return folder
        models = gguf_models([path.name for path in folder.glob(f"*{GGUF_SUFFIX}")])
        if len(models) == 1:
            return folder / models[0]
    except LocalEntryNotFoundError:
        pass  # not, or not completely, in the cache
    except HFValidationError:
        raise CheckpointError(
            f"{repository!r} is neither a folder nor a possible hub id: check its spelling"
        ) from None
    return _download(repository, revision, files)


def _download(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    with hub_errors(repository, revision):
        return _snapshot(repository, revision, files, local_files_only=False)


@contextmanager
def hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Within it, what goes wrong at the hub is a HubError of one sentence.

    Raises:
        HubError: the hub does not have it or does not give it, or cannot be reached.
    """
    from httpx2 import ConnectError, ConnectTimeout, HTTPError, InvalidURL, UnsupportedProtocol
    from huggingface_hub import constants, errors

    name = repository if revision is None else f"{repository}@{revision}"
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms on {constants.ENDPOINT}/{repository}, "
            "then run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{name} is neither a folder nor a public model on the hub: check the name, "
            "or run `hf auth login` for a private one"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{repository} has no revision {revision} on the hub: check its name"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise HubError(
            f"{name} is neither a folder nor complete in the hub cache, and the hub cannot be "
            "reached: connect to the network, or pass the folder of a copy"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise HubError(
            f"HF_HUB_OFFLINE is set, so the hub is not asked for {name}: unset it"
        ) from None
    except (ConnectError, ConnectTimeout) as error:
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached ({_reason(error)}): connect to the network, "
            "or set HF_ENDPOINT to a mirror; what was fetched is kept"
        ) from None
    except (InvalidURL, UnsupportedProtocol) as error:
        raise HubError(
            f"{constants.ENDPOINT!r} is no address of a hub ({_reason(error)}): correct "
            "HF_ENDPOINT, such as https://huggingface.co"
        ) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (404, 410) and "/resolve/" in str(error.response.url):
            raise HubError(
                f"{constants.ENDPOINT} lists a file of {name} that it does not have "
                f"({error.response.url}): name another revision, or tell the model's owner"
            ) from None
        if error.response.status_code in (401, 403):
            raise HubError(
                f"the hub does not give {name} to this token ({error.response.status_code}): "
                "correct HF_TOKEN, or run `hf auth login`"
            ) from None
        if error.response.is_client_error and error.response.status_code not in (408, 429):
            raise HubError(
                f"the hub refuses {name} ({_reason(error)}): correct HF_ENDPOINT, or ask whoever "
                "runs it"
            ) from None
        raise _stopped(name, error) from None
    except (OSError, HTTPError) as error:
        raise _stopped(name, error) from None


def _stopped(name: str, error: Exception) -> HubError:
    code = error.errno if isinstance(error, OSError) else None
    remedy = {
        errno.ENOSPC: "free some space, and run again to continue it",
        errno.EACCES: "set HF_HOME to a folder that you may write to",
        errno.EROFS: "set HF_HOME to a folder that can be written to",
        errno.ENOTDIR: "set HF_HOME to a folder, or move that file away",
        errno.EEXIST: "set HF_HOME to a folder, or move that file away",
    }.get(code or 0, "run again to continue it")
    return HubError(f"the download of {name} stopped ({_reason(error)}): {remedy}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _snapshot(
    repository: str, revision: str | None, files: Sequence[str], *, local_files_only: bool
) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(files),
            local_files_only=local_files_only,
        )
    )
