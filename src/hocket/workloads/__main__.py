"""One worker of a run: ``python -m hocket.workloads RUN_DIRECTORY``.

Which worker it is stands in the environment, as torchrun writes it; without that it is the only one.
"""

import os
import sys
from pathlib import Path

from hocket.workloads import _cores
from hocket.workloads._run import RunDirectory


def main() -> None:
    """Take this worker's cores, and only then import torch, whose threads inherit them."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m hocket.workloads RUN_DIRECTORY (hocket train makes one)")
    cores = _cores.take(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from hocket.workloads._work import work

    work(RunDirectory(Path(sys.argv[1])), cores)


if __name__ == "__main__":
    main()
