"""A text in the user's editor: /edit, and Ctrl-O on the input line."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from clover_local.cli.prompts import decode
from clover_local.errors import SettingsError


def edited(text: str) -> str:
    """`text` after the user changed it in `$VISUAL` or `$EDITOR`, without a last newline.

    Raises:
        SettingsError: no editor, or one that failed; text that is no UTF-8.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="clover-local-") as folder:
        path = Path(folder) / "question.txt"
        path.write_bytes(text.encode(errors="replace") + b"\n")
        try:
            done = subprocess.run([*shlex.split(command), str(path)], check=False)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"the editor {command!r} cannot be started ({error}): set EDITOR to another"
            ) from None
        if done.returncode != 0:
            raise SettingsError(
                f"the editor {command!r} ended with code {done.returncode}: nothing was asked"
            )
        content = path.read_bytes()
    try:
        return decode(content, "the edited question").rstrip("\r\n")
    except SettingsError as error:
        raise SettingsError(f"{error} (it is kept in {_kept(content)})") from None


def _kept(content: bytes) -> str:
    """A file, for its owner only, with what the user wrote and nothing can be made of."""
    descriptor, name = tempfile.mkstemp(prefix="clover-local-question-", suffix=".txt")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return name
