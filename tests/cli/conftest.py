"""The command line, run inside the test process, a loaded golden model, and a hub."""

import hashlib
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from clover_local.chat import Conversation
from clover_local.cli import console
from clover_local.cli.app import main
from clover_local.cli.talk import ChatState
from clover_local.decoding.settings import resolve
from clover_local.placement import MemoryOptions
from clover_local.session import OpenModel, load, open_model


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `clover-local ARGUMENTS`, with `stdin` as a pipe (None: as a terminal)."""

    def run(*arguments: str, stdin: bytes | None = None) -> Outcome:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        if stdin is None:
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys, "argv", ["clover-local", *arguments])
        try:
            code = main()
        finally:
            console.set_quiet(False)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture(scope="session")
def opened(golden_folder: Path) -> OpenModel:
    return open_model(str(golden_folder))


@pytest.fixture
def chat(opened: OpenModel) -> ChatState:
    """A chat with the golden model, in answers of at most 40 tokens."""
    return _chat(opened, MemoryOptions())


@pytest.fixture
def small_cache_chat(opened: OpenModel) -> ChatState:
    """The same with 9 of the 32 experts on the device."""
    return _chat(opened, MemoryOptions(expert_slots=9))


def _chat(opened: OpenModel, memory: MemoryOptions) -> ChatState:
    resolved = resolve(opened.config, opened.generation, {"max_new_tokens": 40})
    session = load(opened, resolved.settings, device="cpu", memory=memory)
    return ChatState(session, Conversation(opened.tokenizer, session.generator), resolved)


@dataclass
class Hub:
    """A hub with one repository, `owner/name`, on a port of this machine; and what it was asked."""

    cache: Path
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    """After so many bytes the next answers with a large file end with their connection."""
    wrong: int = 0
    """So many answers with a large file have a wrong byte."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """(status, error code) of the next answers."""
    surplus: int = 0
    """So many bytes more than it says has each large file."""
    absent: str = "RepoNotFound"
    """The error code of what there is not."""
    keeps_ranges: bool = True
    pause: float = 0.0
    """Seconds between two pieces of a large file."""
    token: str | None = None
    commit: str = "c" * 40
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(name, Range) of each file that was sent."""
    url: str = ""

    def put(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".gguf", ".bin"))

    def hash(self, name: str) -> str:
        content = self.files[name]
        if self.is_large(name):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def blobs(self) -> Path:
        return self.cache / "models--owner--name" / "blobs"

    @property
    def snapshot(self) -> Path:
        return self.cache / "models--owner--name" / "snapshots" / self.commit

    def listing(self) -> bytes:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(content)}
            entry["blobId"] = "0" * 40 if self.is_large(name) else self.hash(name)
            if self.is_large(name):
                entry["lfs"] = {
                    "sha256": self.hash(name),
                    "size": len(content),
                    "pointerSize": 100,
                }
            siblings.append(entry)
        return json.dumps({"id": "owner/name", "sha": self.commit, "siblings": siblings}).encode()


class _HubHandler(BaseHTTPRequestHandler):
    """The few calls that huggingface_hub makes."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if hub.refusals:
            self._refuse(*hub.refusals.pop(0))
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._refuse(401, "RepoNotFound")
        elif path in ("/api/models/owner/name", "/api/models/owner/name/revision/v2"):
            self._send(200, hub.listing(), {})
        elif path.startswith("/api/models/owner/name/revision/"):
            self._refuse(404, "RevisionNotFound")
        elif path.startswith(prefix := f"/owner/name/resolve/{hub.commit}/"):
            self._send_file(path.removeprefix(prefix))
        else:
            self._refuse(404, hub.absent)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hub.hash(name)}"'}
        if self.command == "HEAD":
            self._send(200, content, headers)
            return
        asked = self.headers.get("Range")
        hub.asked.append((name, asked))
        start = 0
        if asked and hub.keeps_ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = bytearray(content[start:])
        if not hub.is_large(name):
            self._send(200, bytes(body), headers)
            return
        body += b"z" * hub.surplus
        if hub.wrong:
            hub.wrong -= 1
            body[len(body) // 2] ^= 1
        self._send(206 if start else 200, b"", {**headers, "Content-Length": str(len(body))})
        end = hub.cuts.pop(0) if hub.cuts else len(body)
        for at in range(0, end, 1 << 16):
            self.wfile.write(body[at : min(at + (1 << 16), end)])
            time.sleep(hub.pause)
        self.close_connection = end < len(body)


class _Server(ThreadingHTTPServer):
    """One that is silent when its client leaves."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub in the place of the real one, with an empty cache of its own."""
    made = Hub(tmp_path / "hub")
    handler = type("Handler", (_HubHandler,), {"hub": made})
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
        for variable in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(variable, raising=False)
        huggingface_hub.close_session()  # it may know a proxy
        yield made
        server.shutdown()
