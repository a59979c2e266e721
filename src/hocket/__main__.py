"""The command `hocket`, which is also `python -m hocket`."""

import signal
import sys


def main() -> None:
    """Run it; Ctrl-C ends it without a traceback while it is being loaded, too."""
    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") == "run":  # a step that has just begun
        from hocket import _early

        _early.listen()
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as in a shell's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hocket import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
