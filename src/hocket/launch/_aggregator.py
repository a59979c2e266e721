"""An aggregator beside the ranks of one launch, with a token of its own, ended with the job."""

import os
import secrets
import subprocess
import sys
import time

from ._elastic import LaunchError
from ._job import Job
from ._sweep import JOB_VARIABLE

_START_S = 30.0


def start_aggregator(job: Job) -> dict[str, str]:
    """Start it, and wait until it listens.

    Args:
        job: In whose directory the token lies, and which ends the process.

    Returns:
        What the ranks' environment must have for them to use it.

    Raises:
        LaunchError: It did not start.
    """
    token_file = os.path.join(job.directory, "aggregator-token")
    address_file = os.path.join(job.directory, "aggregator-address")
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    options = ["--listen", "127.0.0.1:0", "--token-file", token_file, "--address-file", address_file]
    process = subprocess.Popen(
        [sys.executable, "-m", "hocket", "aggregator", *options],
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
