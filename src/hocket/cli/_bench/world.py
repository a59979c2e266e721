"""Starts the ranks of a measurement, by mpiexec where MPI takes part, and brings back what rank 0 found."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hocket._extras import require
from hocket._limits import usable_cores


class BenchError(RuntimeError):
    """The measurement could not be made; the message says what to do."""


def run_world(
    module: str, spec: Mapping[str, Any], n: int, *, what: str, mpi: bool, timeout_s: float
) -> dict[str, Any]:
    """Run `python -m module SPEC` on `n` ranks of this host and return the JSON value that rank 0 wrote.

    The module's main guard calls `work`; mpiexec starts the ranks where they need `mpi`. Stderr says `what` is measured
    and where it is. Raises BenchError: a rank failed, time ran out, or this is itself one rank of a job.
    """
    number, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if number and size.isdigit() and int(size) > 1:
        raise BenchError(
            f"this is rank {number} of a job of {size}, each of which would measure its own host alone, all at once; "
            "start it once, without a launcher. `hocket run --hosts A,B -m hocket cluster probe` measures between hosts"
        )
    cores = usable_cores()
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as directory:
        spec_path, result_path = Path(directory) / "spec.json", Path(directory) / "result.json"
        spec_path.write_text(json.dumps({**spec, "n": n, "store": f"{directory}/store", "result": str(result_path)}))
        at_path = Path(directory) / "at"  # what rank 0 says of where it is
        at_path.touch()
        command = [sys.executable, "-m", module, str(spec_path)]
        env = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // n)), "WORLD_SIZE": str(n), "TMPDIR": directory}
        pipe: dict[str, Any] = {"start_new_session": True, "stderr": subprocess.PIPE, "text": True}
        if mpi:
            launch = [mpiexec(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(n), *command]
            ranks = [subprocess.Popen(launch, env=env, **pipe)]
        else:
            ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}, **pipe) for r in range(n)]
        try:
            with _saying(f"measuring {what} on {n} ranks") as say, at_path.open() as at:
                _wait(ranks, time.monotonic() + timeout_s, timeout_s, lambda: say(at.readline().strip()))
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        result: dict[str, Any] = json.loads(result_path.read_text())
        return result


@contextlib.contextmanager
def _saying(title: str) -> Iterator[Callable[[str], None]]:
    """Say what goes on to a terminal in one line that changes, and else line by line; an empty text says nothing."""
    console = Console(stderr=True)
    with console.status(title) as status:
        change = status.update if console.is_terminal else console.print
        yield lambda text: change(f"{title}: {text}") if text else None


def _wait(ranks: list[subprocess.Popen[str]], deadline_s: float, timeout_s: float, look: Callable[[], object]) -> None:
    while any(rank.poll() is None for rank in ranks):
        look()
        if any(rank.poll() for rank in ranks):
            break
        if time.monotonic() > deadline_s:
            raise BenchError(f"the measurement did not end within {timeout_s:.0f} s; give --timeout, or fewer --rounds")
        time.sleep(0.05)
    failed = [(r, rank) for r, rank in enumerate(ranks) if rank.poll()]
    if failed:
        number, rank = failed[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        said = rank.communicate()[1].strip().splitlines()
        raise BenchError(f"rank {number} ended with exit code {rank.returncode}:\n" + "\n".join(said[-25:]))


def require_mpi() -> None:
    """Make sure that mpi4py and its mpiexec are installed.

    Raises:
        MissingExtraError: mpi4py is not installed.
        BenchError: There is no mpiexec, or no MPI that mpi4py loads.
    """
    require("--against mpi", "mpi4py")
    mpiexec()
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # there is no libmpi, or it is of another MPI
        said = "; ".join(str(error).splitlines())
        remedy = 'pip install "hocket[bench]" brings Open MPI, which does not need the system\'s'
        raise BenchError(f"--against mpi: mpi4py cannot load an MPI ({said}); {remedy}") from None


def mpiexec() -> str:
    """Return the launcher of the installed MPI. Raises BenchError: there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        for entry in sys.path:
            candidate = Path(entry).parents[2] / "bin" / "mpiexec" if len(Path(entry).parents) > 2 else None
            if candidate is not None and candidate.exists():
                return str(candidate)
        raise BenchError('no mpiexec was found, which --against mpi needs: pip install "hocket[bench]" brings Open MPI')
    return found
