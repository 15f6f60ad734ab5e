"""From a model's name to its folder: folders, the demo, the hub's cache, and a hub out of reach."""

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from clover_local import demo
from clover_local.errors import CheckpointError, HubError
from clover_local.hub import DESCRIPTION_FILES, locate

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, without network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def put(cache: Path, repository: str, *names: str) -> Path:
    """A model as the hub's client leaves it in its cache."""
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(REVISION, encoding="utf-8")
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_text("{}", encoding="utf-8")
    return snapshot


def test_a_folder_is_itself(model_folder: Path) -> None:
    assert locate(str(model_folder)) == model_folder


def test_a_home_folder_may_be_abbreviated(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(model_folder.parent))
    assert locate("~/model") == model_folder


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "owner/name", "config.json")
    (tmp_path / "here" / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert locate("owner/name") == Path("owner/name")


def test_demo_is_the_bundled_model_and_a_path_to_a_folder_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("demo") == Path(str(demo.__file__)).parent
    assert locate("./demo").absolute() == tmp_path / "demo"


@pytest.mark.parametrize(
    "name",
    ["", "no-such-model", "/no/such/folder", "a/b/c", "a/b@", "ö/b", "../x/y", "a b/c", "\0/x"],
)
def test_what_is_neither_folder_nor_hub_id_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*: pass the folder"):
        locate(name)


@pytest.mark.parametrize("name", ["x.gguf", "models/x.gguf", "/no/such/x.gguf"])
def test_an_absent_gguf_file_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"there is no file '{name}': check its name"):
        locate(name)


@pytest.mark.parametrize("name", ["a--b/c", "a..b/c", "a/b.git", "a/b-", "a/" + "b" * 300])
def test_an_id_that_the_hub_would_never_give_is_an_error(name: str) -> None:
    with pytest.raises(CheckpointError, match="possible hub id"):
        locate(name)


def test_a_name_longer_than_any_path_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        locate("x" * 5000)


def test_a_file_is_no_model(model_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file: pass the folder"):
        locate(str(model_folder / "config.json"))


def test_a_cached_model_needs_no_network(cache: Path) -> None:
    snapshot = put(cache, "owner/na.me", "config.json")
    assert locate("owner/na.me") == snapshot
    assert locate("owner/na.me@main") == snapshot
    assert locate(f"owner/na.me@{REVISION}") == snapshot


def test_a_cache_without_the_config_is_not_enough(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "owner/name", "tokenizer.json")
    calls: list[bool] = []

    def snapshot_download(repository: str, *, local_files_only: bool, **rest: object) -> str:
        calls.append(local_files_only)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("owner/name") == cache
    assert calls == [True, False]


def test_only_the_wanted_files_are_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []

    def snapshot_download(repository: str, **arguments: object) -> str:
        if arguments["local_files_only"]:
            raise errors.LocalEntryNotFoundError("not there")
        fetched.append((repository, arguments["revision"], arguments["allow_patterns"]))
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("owner/name@v2", files=DESCRIPTION_FILES) == cache
    assert fetched == [("owner/name", "v2", ["*.json", "*.jinja"])]


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "http://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (
            errors.GatedRepoError("", response=response(403)),
            "o/n@v is gated: accept its terms on https://huggingface.co/o/n",
        ),
        (
            errors.RepositoryNotFoundError("", response=response(404)),
            "o/n@v is neither a folder nor a public model on the hub",
        ),
        (errors.RevisionNotFoundError("", response=response(404)), "o/n has no revision v"),
        (errors.LocalEntryNotFoundError("x"), "and the hub cannot be reached: connect"),
        (OSError(28, "No space left on device"), "stopped ([Errno 28] No space left on device)"),
        (httpx2.ReadError("reset\nby peer"), "the download of o/n@v stopped (reset by peer): run"),
        (errors.HfHubHTTPError("500", response=response(500)), "the download of o/n@v stopped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_goes_wrong_at_the_hub_is_one_line_with_the_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, complaint: str
) -> None:
    def snapshot_download(repository: str, *, local_files_only: bool, **rest: object) -> str:
        raise errors.LocalEntryNotFoundError("x") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(HubError) as caught:
        locate("o/n@v")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "refused"],
)
def test_a_hub_id_without_network_is_one_line_and_needs_no_torch(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    script = (
        "import sys\n"
        "from clover_local.errors import HubError\n"
        "from clover_local.hub import locate\n"
        "try:\n"
        "    locate('owner/name')\n"
        "except HubError as error:\n"
        "    print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HOME": str(tmp_path), **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("owner/name is neither a folder nor complete in the hub cache")
    assert result.stdout.count("\n") == 1
