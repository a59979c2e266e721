"""What comparing operations between hosts costs: an all_reduce as it is, and without any announcement, by turns.

    python -m benchmarks.announcements                                        # as root: two hosts, one rank each
    python -m benchmarks.announcements --hosts 4
    python -m benchmarks.announcements --hosts 2 --ranks 4                    # two ranks on each host

The same group does both: with its own transport, which announces and compares every operation, and with the transport
inside of that, which carries an operation out unannounced. Blocks of operations take turns, in an order that changes; a
pair's ratio is that of the medians of its two blocks, of rank 0. On an emulated network; nothing else may run.
"""  # noqa: D400

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SIZES = (4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
PAIRS, MOST, LONG_S = 31, 200, 0.3


def work(out: Path) -> None:
    """Everything that one rank does."""
    import torch
    import torch.distributed as dist

    from hocket.comm.transport import reducer

    torch.set_num_threads(1)
    dist.init_process_group("hocket")
    rank = dist.get_rank()
    group = dist.distributed_c10d._get_default_group()
    announced = group._host.transport  # type: ignore[attr-defined]
    plain = announced.inner
    total = reducer(dist.ReduceOp.SUM, torch.float32)
    rows = []
    for nbytes in SIZES:
        flat = torch.zeros(nbytes // 4)

        def block(do: Callable[..., object], count: int, flat: torch.Tensor = flat) -> float:
            taken = []
            for _ in range(count):
                begin_s = time.perf_counter()
                do(flat, total, 60.0)
                taken.append(time.perf_counter() - begin_s)
            return statistics.median(taken)

        count = [max(5, min(MOST, int(LONG_S / block(plain.all_reduce, 20))))]
        dist.broadcast_object_list(count)
        block(announced.all_reduce, 20)
        pairs = []
        for number in range(PAIRS):
            took = {}
            for name in ("plain", "announced") if number % 2 else ("announced", "plain"):
                took[name] = block((announced if name == "announced" else plain).all_reduce, count[0])
            pairs.append((took["plain"], took["announced"]))
        rows.append({"nbytes": nbytes, "pairs": pairs})
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="as many as hosts if not given")
    parser.add_argument("--bandwidth", default="1Gbit/s")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        work(given.rank)
        return
    ranks = given.ranks or given.hosts
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"star:hosts={given.hosts},bandwidth={given.bandwidth}"
        command = ["-m", "hocket", "run", "--fabric", cluster, "-n", str(ranks)]
        words = [sys.executable, *command, __file__, "--rank", str(Path(folder, "rows.json"))]
        subprocess.run(words, check=True, env=os.environ | {"HOCKET_RECORD": "off"})
        rows = json.loads(Path(folder, "rows.json").read_text())
    print(f"{ranks} ranks on {given.hosts} hosts at {given.bandwidth}")
    print("| bytes | without, ms | announced, ms | announced / without (quartiles) |\n|---:|---:|---:|---:|")
    for row in rows:
        without_s, announced_s = (statistics.median(column) for column in zip(*row["pairs"], strict=True))
        low, middle, high = statistics.quantiles([b / a for a, b in row["pairs"]], n=4)
        print(
            f"| {row['nbytes']} | {without_s * 1e3:.3f} | {announced_s * 1e3:.3f} "
            f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
        )


if __name__ == "__main__":
    main()
