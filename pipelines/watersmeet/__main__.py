"""`python -m watersmeet` is the same as `watersmeet`."""

from __future__ import annotations

import signal
import sys
import threading


def main() -> None:
    """Run the command. Ctrl-C ends it silently, also while its modules are being imported."""
    is_heard = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_heard:  # some modules make another exception of a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from watersmeet.cli import main as run_command

    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # a worker process imports it, too
    main()
