def pytest_addoption(parser):
    parser.addoption("--golden-update", action="store_true", help="write what the golden transcripts' commands print")
