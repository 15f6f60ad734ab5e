"""`clover-local verify`: whether the files of a model are whole and the right ones.

Each file is read once: for its sha256, and if it holds weights for numbers that are none (NaN,
infinity). Hashes are compared with `SHA256SUMS` in the folder, and for a model in the hub cache
with the names of the cache's blobs, which are the hashes that the hub gave.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from clover_local.checkpoint.placements import open_checkpoint
from clover_local.checkpoint.shards import Shard, abbreviated, read_shard
from clover_local.checkpoint.summary import SUMMARY_NAME, read_summary, summarize
from clover_local.cli import console
from clover_local.cli.options import JsonOpt, ModelArg, QuietOpt
from clover_local.config import read_generation_config, read_model_config
from clover_local.errors import CheckpointError, CloverError
from clover_local.files import replacing
from clover_local.hub import MODEL_FILES, locate

SUMS_NAME = "SHA256SUMS"

WriteOpt = Annotated[
    bool, typer.Option("--write", help=f"Write {SUMS_NAME} into the folder if nothing is wrong.")
]

_CHUNK_BYTES = 1 << 22
# Where a float's exponent lies: all ones there mean NaN or infinity.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_SUMS_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](\S.*)")
_BLOB_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileReport:
    """One file: its hash, what the hash agrees with, and what is wrong with it."""

    name: str
    bytes: int
    sha256: str
    agrees_with: tuple[str, ...]
    problems: tuple[str, ...]


def verify(
    model: ModelArg, as_json: JsonOpt = False, write: WriteOpt = False, quiet: QuietOpt = False
) -> None:
    """Check that the files of MODEL are whole and hold the right bytes."""
    folder = locate(model)
    if folder.is_file():
        raise CheckpointError(
            f"{model} is one file, and verify reads folders: `clover-local info` checks its header"
        )
    with console.progress(f"reading {model}") as report:
        files = check_files(folder, report)
    problems = _loading_problems(folder)
    if as_json:
        rows = [asdict(file) for file in files]
        console.print_json({"folder": str(folder), "files": rows, "problems": problems})
    else:
        for file in files:
            console.text(_line(file))
    wrong = [f"{file.name} {problem}" for file in files for problem in file.problems]
    if wrong:
        raise CheckpointError(f"{folder}: {abbreviated(wrong)}: download what is wrong again")
    if problems:
        raise CheckpointError("; ".join(problems))
    if write:
        write_sums(folder, files)
        console.note(f"wrote {folder / SUMS_NAME}")


def check_files(
    folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[FileReport]:
    """Reads every file of a model, and those that `SHA256SUMS` names.

    Raises:
        CheckpointError: `SHA256SUMS` or one of the files cannot be read.
    """
    sums = read_sums(folder)
    names = {path.name for pattern in MODEL_FILES for path in folder.glob(pattern)} | sums.keys()
    paths = [folder / name for name in sorted(names)]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total)

    try:
        return [_check_file(path, sums.get(path.name), count) for path in paths]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read ({error.strerror}): check disk and permissions"
        ) from None


def read_sums(folder: Path) -> dict[str, str]:
    """File name to sha256, from the folder's `SHA256SUMS`; empty where there is none.

    Raises:
        CheckpointError: the file is not in the format of the tool `sha256sum`.
    """
    path = folder / SUMS_NAME
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): remove it") from None
    sums = {}
    for line in filter(None, lines):
        match = _SUMS_LINE.fullmatch(line)
        if match is None or Path(match[2]).name != match[2]:
            raise CheckpointError(f"{path} has the line {line!r}, which sha256sum would not write")
        sums[match[2]] = match[1].lower()
    return sums


def write_sums(folder: Path, files: Iterable[FileReport]) -> None:
    """Writes `SHA256SUMS`, all or nothing, in the format of the tool `sha256sum`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    path = folder / SUMS_NAME
    try:
        with replacing(path) as file:
            file.writelines(f"{report.sha256}  {report.name}\n".encode() for report in files)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror})") from None


def _check_file(path: Path, expected: str | None, on_bytes: Callable[[int], None]) -> FileReport:
    if not path.is_file():
        absent = f"is in {SUMS_NAME} but not in the folder"
        problem = "is no file" if os.path.lexists(path) else absent
        return FileReport(path.name, 0, "", (), (problem,))
    problems = []
    shard: Shard | None = None
    if path.suffix == ".safetensors":
        try:
            shard = read_shard(path)
        except CheckpointError as error:
            text = str(error).removeprefix(f"{path}").lstrip(": ")
            problems.append(text.removesuffix(": download it again"))
    sha256, not_finite = _read(path, shard, on_bytes)
    if not_finite:
        problems.append(f"holds NaN or infinity in {abbreviated(not_finite)}")
    hashes = {SUMS_NAME: expected, "the hub": _blob_hash(path)}
    for name, other in hashes.items():
        if other not in (None, sha256):
            problems.append(f"has another sha256 than in {name}")
    return FileReport(
        name=path.name,
        bytes=path.stat().st_size,
        sha256=sha256,
        agrees_with=tuple(name for name, other in hashes.items() if other == sha256),
        problems=tuple(problems),
    )


def _read(
    path: Path, shard: Shard | None, on_bytes: Callable[[int], None]
) -> tuple[str, list[str]]:
    """The sha256 of a file, and the names of its tensors that hold NaN or infinity."""
    digest = hashlib.sha256()
    not_finite = []
    with path.open("rb") as file:
        for tensor in shard.tensors if shard else ():
            header = file.read(tensor.start - file.tell())  # before the first; between them nothing
            digest.update(header)
            on_bytes(len(header))
            finite = True
            left = tensor.nbytes
            while chunk := file.read(min(left, _CHUNK_BYTES)):
                left -= len(chunk)
                digest.update(chunk)
                on_bytes(len(chunk))
                finite = finite and _is_finite(chunk, tensor.dtype)
            if not finite:
                not_finite.append(tensor.name)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest(), not_finite


def _is_finite(chunk: bytes, dtype: str) -> bool:
    import numpy as np  # late: `--help` need not wait for it

    if dtype not in _EXPONENTS:
        return True
    word, exponent = _EXPONENTS[dtype]
    return not bool(((np.frombuffer(chunk, word) & exponent) == exponent).any())


def _blob_hash(path: Path) -> str | None:
    """The hash that the hub gave for a large file of its cache: the file is a link to that name."""
    if not path.is_symlink():
        return None
    blob = Path(os.readlink(path)).name
    return blob if _BLOB_NAME.fullmatch(blob) else None


def _loading_problems(folder: Path) -> list[str]:
    """Why the model as a whole could not be loaded, although each file may be whole."""
    from clover_local.tokenizer import Tokenizer  # late: `--help` need not wait for it

    problems = []
    try:
        config = read_model_config(folder)
        read_generation_config(folder, config)
        checkpoint = open_checkpoint(folder, config)
        checkpoint.require_fit()
        if read_summary(folder) not in (None, summarize(checkpoint)):
            problems.append(f"{folder / SUMMARY_NAME} describes other weights: remove it")
        tokenizer = Tokenizer.load(folder)
        tokenizer.require_fit(config.vocab_size)
        tokenizer.check_templates()
    except CloverError as error:
        problems.append(str(error))
    return problems


def _line(file: FileReport) -> str:
    remarks = [*file.problems, *(f"as in {name}" for name in file.agrees_with)]
    status = "WRONG" if file.problems else "ok   "
    return "  ".join([status, file.sha256 or "-" * 64, file.name, "; ".join(remarks)]).rstrip()
