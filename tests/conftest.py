import signal


def pytest_addoption(parser):
    parser.addoption("--golden-update", action="store_true", help="write what the golden transcripts' commands print")


def pytest_configure(config):
    # A shell without job control starts what it puts in the background with SIGINT ignored, which children inherit: the
    # tests that interrupt a launcher would wait for ever. A handler, unlike "ignore", is not inherited.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
