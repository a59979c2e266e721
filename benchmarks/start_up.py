"""Seconds from `hocket run`, torchrun or python to rank 0's first step, and the CPU seconds of all processes.

    python -m benchmarks.start_up --rounds 10

Commands take turns, so that a busy moment hits them alike; a first round does not count. The step is that of a linear
model, so nearly all is start. Nothing else may run beside it; on a busy machine only the CPU seconds say something.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8)
if sys.argv[1] == "distribute":
    import hocket
    model, optimizer, loader = hocket.distribute(model, optimizer, loader)
elif sys.argv[1] in ("hocket", "gloo"):
    torch.distributed.init_process_group(sys.argv[1])
    model = torch.nn.parallel.DistributedDataParallel(model)
for x, y in loader:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    break
if os.environ.get("RANK", "0") == "0":
    print("first", time.time() - float(os.environ["BEGUN_S"]), flush=True)
if torch.distributed.is_initialized() and sys.argv[1] != "distribute":
    torch.distributed.destroy_process_group()
"""


def measured(command: list[str], directory: str) -> tuple[float, float]:
    """Return the seconds to the first step, and the CPU seconds of all processes of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "BEGUN_S": repr(time.time()), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=600)
    made = command[-1] == "gloo" and "first" in ran.stdout  # Gloo's processes abort at their end now and then
    if ran.returncode and not made:
        raise SystemExit(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first = next(float(line.split()[-1]) for line in ran.stdout.splitlines() if "first" in line)
    return first, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-n", type=int, default=2, help="ranks")
    given = parser.parse_args()
    python = [sys.executable]
    hocket = [*python, "-m", "hocket", "run", "-n", str(given.n)]
    torchrun = [*python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.n}"]
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "script.py")
        script.write_text(SCRIPT)
        commands = {
            "python script.py, one process without Hocket": [*python, str(script), "plain"],
            "hocket run, hocket.distribute": [*hocket, str(script), "distribute"],
            "torchrun, hocket.distribute": [*torchrun, str(script), "distribute"],
            "hocket run, DDP on hocket": [*hocket, str(script), "hocket"],
            "torchrun, DDP on hocket": [*torchrun, str(script), "hocket"],
            "torchrun, DDP on Gloo": [*torchrun, str(script), "gloo"],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(given.rounds + 1):
            for name, command in commands.items():
                if turn:
                    found[name].append(measured(command, directory))
                else:
                    measured(command, directory)
    print(f"| {given.n} ranks, medians of {given.rounds} | s to the first step | least | CPU s of all | least |")
    print("|---|---|---|---|---|")
    for name, times in found.items():
        columns = [column for each in zip(*times, strict=True) for column in (statistics.median(each), min(each))]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in columns)} |")


if __name__ == "__main__":
    main()
