"""What may be opened as a file of a model: a pipe would block, a device might never end."""

import errno
import os
import stat
from pathlib import Path


def require_file(path: Path) -> None:
    """Raises OSError, as opening it would, where `path` is no regular file and no link to one.

    A file that is simply not there is a FileNotFoundError; a link to nothing is none, because the
    file is then meant to be there.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.EINVAL, "a link to nothing", str(path)) from None
        raise
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
