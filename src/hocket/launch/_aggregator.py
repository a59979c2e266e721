"""An aggregator beside the ranks of one launch, with a token of its own, ended with the job."""

import os
import secrets
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from ._elastic import LaunchError
from ._job import Job
from ._sweep import JOB_VARIABLE

if TYPE_CHECKING:
    from ._fabric import Placement

_START_S = 30.0


def start_aggregator(job: Job, placement: "Placement | None" = None) -> dict[str, str]:
    """Start it, and wait until it listens.

    In an emulated cluster it runs beside the switch that is nearest to all, or in rank 0's host if there is none.

    Args:
        job: In whose directory the token lies, and which ends the process.
        placement: Where the ranks go in an emulated cluster; None for this host.

    Returns:
        What the ranks' environment must have for them to use it.

    Raises:
        LaunchError: It did not start.
    """
    token_file = os.path.join(job.directory, "aggregator-token")
    address_file = os.path.join(job.directory, "aggregator-address")
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    fabric, place = placement.aggregator() if placement else (None, "")
    listen = f"{fabric.address(place)}:0" if fabric else "127.0.0.1:0"
    options = ["--listen", listen, "--token-file", token_file, "--address-file", address_file]
    command = [sys.executable, "-m", "hocket", "aggregator", *options]
    process = subprocess.Popen(
        fabric.command_in(place, command) if fabric else command,
        env={**os.environ, JOB_VARIABLE: job.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the ranks; it is ended after them
    )
    job.add_rank(process.pid)
    deadline_s = time.monotonic() + _START_S
    while not os.path.exists(address_file):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise LaunchError(f"the aggregator did not start (exit status {process.poll()}); see `hocket aggregator`")
        time.sleep(0.01)
    with open(address_file) as file:
        address = file.read().strip()
    return {"HOCKET_AGGREGATOR": address, "HOCKET_AGGREGATOR_TOKEN_FILE": token_file}
