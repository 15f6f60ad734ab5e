"""Weights from the hub, file by file: what is there counts, a stop loses nothing, hashes agree.

huggingface_hub lays out the cache. The bytes are fetched here, because its own download begins a
file anew after a stop: what has come of a blob stays beside it as `HASH.incomplete` and is
continued with an HTTP range.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from clover_local.errors import HubError
from clover_local.fetch.remote import TIMEOUT, Remote, RemoteFile, size_of, token_header
from clover_local.files import replacing, sync_folder
from clover_local.hub import blob_lock, hub_errors

TRIES = 5  # of a connection that breaks before a byte has come

_PASSING = (429, 500, 502, 503, 504)
"""Answers that may be others a moment later."""

_NO_SUCH_RANGE = 416

OnBytes = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""


def remove_damaged(
    remote: Remote, *, on_progress: OnBytes = lambda done, total: None
) -> tuple[str, ...]:
    """Reads the files that are here; those with another hash go, and their names come back.

    Args:
        on_progress: called with bytes read and bytes in all.
    """
    present = {remote.place(file): file for file in remote.files if remote.place(file).exists()}
    meter = _Meter(on_progress, sum(file.nbytes for file in present.values()))
    damaged = {
        path for path, file in present.items() if file.digest_of(path, meter.add) != file.hash
    }
    names = tuple(file.name for file in remote.files if remote.place(file) in damaged)
    for path in damaged:
        path.unlink()
    return names


def fetch(
    remote: Remote,
    *,
    on_progress: OnBytes = lambda done, total: None,
    on_check: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_wait: Callable[[str], None] = lambda name: None,
    pause: float = 1.0,
) -> int:
    """Makes every file of `remote` be here whole; returns the bytes that were fetched.

    Args:
        on_progress: called with bytes fetched and bytes to fetch in all.
        on_check: called with the name of a file whose hash is computed, bytes read, bytes in all.
        on_wait: called with the name of a file that another process fetches, which is waited for.
        pause: seconds before a broken connection is tried again, at first.

    Raises:
        HubError: the connection stays broken, the disk is full, the hub sends damaged files.
    """
    meter = _Meter(on_progress, remote.missing_bytes)
    with hub_errors(remote.name, remote.revision):
        for file in remote.files:
            if not remote.has(file):
                check = _Meter(partial(on_check, file.name), file.nbytes)
                with _locked(remote, file.hash, partial(on_wait, file.name)):
                    _fetch_whole(remote, file, meter, check, pause=pause)
        with _locked(remote, "names", partial(on_wait, "the same model")):
            _lay_out(remote)
    return meter.done


def _fetch_whole(
    remote: Remote, file: RemoteFile, meter: "_Meter", check: "_Meter", *, pause: float
) -> None:
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
        check.done = 0
        digest = file.digest_of(part, check.add)
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
        before = size_of(part)
        failure = _attempt(remote, file, meter)
        after = size_of(part)
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
        if error.response.status_code == _NO_SUCH_RANGE:  # the next try is from the start
            meter.total += size_of(remote.part(file))
            remote.part(file).unlink(missing_ok=True)
        elif error.response.status_code not in _PASSING:
            raise
        return error
    return None


def _stream(remote: Remote, file: RemoteFile, meter: "_Meter") -> None:
    """One request for what is missing of a file, appended to what is there.

    No more than that is taken, whatever the hub sends.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

    part = remote.part(file)
    start = size_of(part)
    if start >= file.nbytes:
        if not part.exists():
            part.touch()  # an empty file
        return
    headers = {"Accept-Encoding": "identity", **token_header()}
    if start:
        headers["Range"] = f"bytes={start}-"
    url = hf_hub_url(remote.name, file.name, revision=remote.commit)
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        continues = response.status_code == 206
        left = file.nbytes - start if continues else file.nbytes
        if not continues:
            meter.total += start
        with part.open("ab" if continues else "wb") as out:
            for chunk in response.iter_bytes():  # as it comes: what a chunk lacks would be lost
                out.write(chunk[:left])
                meter.add(min(len(chunk), left))
                left -= len(chunk)
                if left <= 0:
                    break


def _lay_out(remote: Remote) -> None:
    """Gives the files their names, as huggingface_hub does, and the revision its commit."""
    from huggingface_hub import hf_hub_download

    # The config comes last: without it nobody takes the folder for a model.
    for file in sorted(remote.files, key=lambda file: file.name == "config.json"):
        hf_hub_download(remote.name, file.name, revision=remote.commit)
    name = remote.revision or "main"
    if name != remote.commit:
        ref, new = remote.root / "refs" / name, remote.root / "ref"
        ref.parent.mkdir(parents=True, exist_ok=True)
        with replacing(new) as out:  # not in refs: what a kill leaves there is taken for a ref
            out.write(remote.commit.encode())
        new.replace(ref)
        sync_folder(ref.parent)


@contextmanager
def _locked(remote: Remote, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """One process at a time fetches a blob, or gives names; the others wait, and say so."""
    from filelock import Timeout

    (remote.root / "blobs").mkdir(parents=True, exist_ok=True)
    lock = blob_lock(remote.root, name)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _Meter:
    """Counts bytes and reports them; `total` may grow."""

    def __init__(self, report: OnBytes, total: int) -> None:
        self._report = report
        self.total = total
        self.done = 0

    def add(self, count: int) -> None:
        """More bytes are done."""
        self.done += count
        self._report(self.done, self.total)
