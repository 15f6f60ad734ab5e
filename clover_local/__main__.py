"""`clover-local` and `python -m clover_local`: Ctrl-C is quiet from the first import on."""

import signal
import sys


def run() -> int:
    """Loads the command line and runs it; returns the exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else a shell made Ctrl-C do nothing: leave it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from clover_local.cli.app import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
