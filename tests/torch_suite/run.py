"""Runs PyTorch's own distributed tests against a backend: `python run.py BACKEND RESULT.json [NAME ...]`.

The suite ships in the torch wheel. It decides at import, by the name in BACKEND, which tests apply; here it is always
told "gloo", so that every test that applies to Gloo applies, and then the backend under test takes that name's place.
Ranks are forked from this process, which has torch loaded, instead of spawned anew for each of the 200-odd tests.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

WORLD_SIZE = 3


class PassesForGloo(str):
    """A backend's name that equals "gloo" too: some tests ask for that name while they run."""

    __slots__ = ()

    def __eq__(self, other):
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def main(backend, result_path, names):
    with tempfile.TemporaryDirectory(prefix="hocket-suite-") as directory:
        outcomes = run(backend, directory, names)
    Path(result_path).write_text(json.dumps(outcomes, indent=1))


def run(backend, directory, names):
    for name in ("barrier", "test_dir", "init_dir"):
        (Path(directory) / name).mkdir()
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD_SIZE),
        TEMP_DIR=directory,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29512",
        OMP_NUM_THREADS="1",
    )
    import torch
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    distributed_test.BACKEND = PassesForGloo(backend)
    for supported in distributed_test.DistTestCases.backend_feature.values():
        if isinstance(supported, set) and "gloo" in supported:
            supported.add(backend)
    for unsupported in distributed_test.DistTestCases.skip_collective.values():
        if "gloo" in unsupported:
            unsupported.add(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    cases = unittest.defaultTestLoader.loadTestsFromTestCase(Suite)
    outcomes = {}
    for case in cases:
        name = case._testMethodName
        if names and name not in names:
            continue
        result = unittest.TestResult()
        begin = time.monotonic()
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            case.run(result)
        if result.skipped:
            outcome, why = "skipped", result.skipped[0][1]
        elif result.wasSuccessful():
            outcome, why = "passed", ""
        else:
            outcome, why = "failed", (result.failures + result.errors)[0][1]
        outcomes[name] = {"outcome": outcome, "why": why, "seconds": round(time.monotonic() - begin, 2)}
        print(f"{outcome:8s} {outcomes[name]['seconds']:6.2f} {name}", file=sys.stderr, flush=True)
    return outcomes


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
