"""The command `hocket`, which is also `python -m hocket`."""

import signal


def main() -> None:
    """Run it; Ctrl-C ends it without a traceback while it is being loaded, too."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as in a shell's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hocket import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
