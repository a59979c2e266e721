"""Writes the tables to stdout and the plots to a folder: python benchmarks/predictions docs"""

import sys
from pathlib import Path

import eflops
import nvlink
import scaling
import sharp


def main() -> None:
    """All studies, one after the other."""
    folder = Path(sys.argv[1])
    table, plot = eflops.network_report()
    print(f"## EFLOPS, network\n\n{table}\n", flush=True)
    (folder / "eflops.svg").write_text(plot)
    print(f"## EFLOPS, servers\n\n{eflops.server_report()}\n", flush=True)
    small, large, plot = sharp.report()
    print(f"## SHARP\n\n{small}\n\n{large}\n", flush=True)
    (folder / "sharp.svg").write_text(plot)
    print(f"## NVLink\n\n{nvlink.report()}\n", flush=True)
    print(f"## The simulator\n\n{scaling.report()}", flush=True)


main()
