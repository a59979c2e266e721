"""Two checkouts in one interleaved run: collectives, training steps, and how long Trainers take to build.

    python -m benchmarks.before_after OLD NEW --rounds 5
    python -m benchmarks.before_after OLD NEW --rounds 9 --only collectives      # 1 KiB among them

Each round runs both checkouts, in turns who is first, with the same Python and its packages; `hocket` comes from each
checkout's `src`. Printed are medians over the rounds, the spread (smallest and largest), and the median of the ratio
new / old, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BUILD = """
import json, os, sys, time
import torch
from torch import nn
import hocket
from hocket.planner import Plan

torch.set_num_threads(1)

def gpt():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(6)))

def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())))

CASES = {
    "data": (gpt, Plan(), (8, 32, 128)),
    "sharded parameters": (gpt, Plan(shard="parameters"), (8, 32, 128)),
    "tensor": (gpt, Plan(tensor_parallel_degree=2), (8, 32, 128)),
    "pipeline": (gpt, Plan(pipeline_parallel_degree=2, micro_batches=4), (8, 32, 128)),
    "spatial": (convolutions, Plan(spatial_parallel_degree=2), (2, 8, 64, 64)),
}
took = {}
for name, (make, plan, shape) in CASES.items():
    for again in range(2):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        begin = time.perf_counter()
        hocket.Trainer(model, nn.functional.mse_loss, optimizer, plan, sample=torch.ones(shape))
        took[name + (", again" if again else ", first")] = time.perf_counter() - begin
if os.environ["RANK"] == "0":
    open(sys.argv[1], "w").write(json.dumps(took))
"""


def hocket(checkout: Path, *arguments: str) -> str:
    """Run the command of a checkout, and return what it prints."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, "-m", "hocket", *arguments]
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} in {checkout} failed:\n{done.stderr}")
    return done.stdout


def measured(checkout: Path, script: Path, only: str) -> dict[str, float]:
    """Return seconds of everything that is measured, by name; of the collectives alone if asked for."""
    sizes = "1KiB,64KiB,1MiB,16MiB"
    found = {}
    collectives = ("bench", "allreduce", "-n", "2", "--rounds", "3", "--sizes", sizes, "--against", "", "--registered")
    for row in json.loads(hocket(checkout, *collectives, "--json"))["rows"]:
        where = "in place" if row["registered"] else row["system"]
        found[f"all_reduce {row['nbytes'] // 1024} KiB, {where}"] = row["median_s"]
    if only == "collectives":
        return found
    for row in json.loads(hocket(checkout, "bench", "step", "-n", "2", "--rounds", "3", "--json"))["rows"]:
        found[f"step {row['model']}, {row['system']}"] = row["median_s"]
    out = script.with_suffix(".json")
    hocket(checkout, "run", "-n", "2", str(script), str(out))
    for name, seconds in json.loads(out.read_text()).items():
        found[f"build {name}"] = seconds
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["everything", "collectives"], default="everything")
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "build.py"
        script.write_text(BUILD)
        for number in range(asked.rounds):
            for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
                runs[name].append(measured(getattr(asked, name).resolve(), script, asked.only))
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr, flush=True)
    print("| what | old, ms (spread) | new, ms (spread) | new / old (spread) |\n|---|---:|---:|---:|")
    for what in runs["old"][0]:
        old, new = ([1e3 * run[what] for run in runs[name]] for name in ("old", "new"))
        ratios = [n / o for n, o in zip(new, old, strict=True)]
        cells = [f"{statistics.median(v):.3g} ({min(v):.3g} to {max(v):.3g})" for v in (old, new, ratios)]
        print(f"| {what} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
