"""Every architecture of the zoo by every plan: equal to one process, or refused? Prints a Markdown table.

    python -m benchmarks.zoo [--entries "NAME;..."] [--plans NAME,...] [--families NAME,...] [--every N] [--out FILE]
        [--keep DIRECTORY]

It needs `pip install transformers timm diffusers peft einops`, and no network: every model has random weights. The
family "further", all else that transformers has, is tried where it is named. A cell holds 5 steps of AdamW and an
evaluation against a plain loop, then the weights and buffers, and two more steps from the checkpoint by another plan,
in float64 where the model can: "=" if no loss differs by more than 1e-6, or by four times what the plain loop's own
losses differ by when its weights are changed in their last place, and no weight by more than as much; "r" and a
number for a refusal, whose text is below the table; "named" if losses differ and the build said so, of which module
and why; "WRONG" and "RAW" for what must not be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import load
from .entries import ENTRIES
from .plans import PLANS, TABLE, lines_of

TOLERANCE = 1e-6
ENDS = ("CommError", "PeerDiedError", "CollectiveMismatchError", "CollectiveTimeoutError", "TimeoutError")
"""What comes of an error that only another rank has had: no refusal."""

OTHERS = ("the pipeline is not balanced", "tensor parallelism divides")
"""How warnings begin that name no difference."""

SILENCE_S = 150.0
"""After so long without a word a run is ended, and the entry that it was at is said to hang."""


def run(directory: Path, plan: str, names: list[str]) -> None:
    """Try entries by a plan, starting again behind one that has ended the run."""
    left = list(names)
    while left:
        command = [sys.executable, "-m", "hocket", "run", "-n", str(PLANS[plan].ranks), "-m", "benchmarks.zoo.worker"]
        with open(directory / f"{plan}.log", "a") as log:
            started = subprocess.Popen(
                [*command, str(directory), plan, *left], stdout=log, stderr=log, start_new_session=True
            )
            seen, since = -1, time.monotonic()
            while started.poll() is None:
                time.sleep(0.2)
                size = sum(path.stat().st_size for path in directory.glob(f"{plan}.*.jsonl"))
                if size != seen:
                    seen, since = size, time.monotonic()
                elif time.monotonic() - since > SILENCE_S:
                    os.killpg(started.pid, signal.SIGINT)
                    try:
                        started.wait(30)
                    except subprocess.TimeoutExpired:
                        os.killpg(started.pid, signal.SIGKILL)
        done, begun = finished(directory, plan)
        for name in [one for one in left if one in begun and one not in done]:
            done[name] = {}
            with open(directory / f"{plan}.0.jsonl", "a") as file:
                file.write(
                    json.dumps(
                        {"entry": name, "error": "ended the run", "message": tail(directory, plan), "ours": False}
                    )
                    + "\n"
                )
        rest = [name for name in left if name not in done]
        if len(rest) == len(left):
            raise SystemExit(f"{plan}: the run does not begin; see {directory / f'{plan}.log'}")
        left = rest


def finished(directory: Path, plan: str) -> tuple[dict[str, Any], set[str]]:
    """What all ranks have ended, as rank 0 saw it, and what some rank has begun."""
    by_rank, begun = [], set()
    for rank in range(PLANS[plan].ranks):
        lines = lines_of(directory / f"{plan}.{rank}.jsonl")
        begun |= {line["entry"] for line in lines}
        by_rank.append({line["entry"]: line for line in lines if "begun" not in line})
    done = {
        name: dict(line)
        for name, line in by_rank[0].items()
        if line.get("error") == "ended the run" or all(name in one for one in by_rank)
    }
    for name, line in done.items():
        others = [one[name] for one in by_rank[1:] if name in one]
        line["alike"] = all(one.get("error") == line.get("error") for one in others)
        line["off"] = max([line.get("off", 0.0), *(one.get("off", 0.0) for one in others)])
    return done, begun


def tail(directory: Path, plan: str) -> str:
    """The last words of a run."""
    lines = (directory / f"{plan}.log").read_text(errors="replace").splitlines()
    return " | ".join(line for line in lines[-12:] if line.strip())[-600:]


def verdict(line: dict[str, Any]) -> str:
    """ "=", "named", "refused", "WRONG" or "RAW"."""
    if "error" in line:
        return "refused" if line["ours"] and line["alike"] and line["error"] not in ENDS else "RAW"
    if line["off"] <= max(TOLERANCE, 4 * line["noise"]) and not line.get("state"):
        return "="
    return "named" if any(not one.startswith(OTHERS) for one in line["warnings"]) else "WRONG"


def table(seen: dict[str, dict[str, Any]], plans: list[str]) -> str:
    """The Markdown table, and the refusals by letter."""
    reasons: dict[str, int] = {}
    rows = [
        f"| model | {' | '.join(plans)} | held by tensor | by pipeline-2 | build, s |",
        "|" + "---|" * (len(plans) + 4),
    ]
    for name, cells in seen.items():
        row = []
        for plan in plans:
            if plan not in cells:
                row.append("")
                continue
            line = cells[plan]
            what = verdict(line)
            if what == "=":
                row.append("=" if line["off"] <= TOLERANCE else f"= ({line['off']:.0e}, own {line['noise']:.0e})")
            elif what == "refused":
                row.append(f"r{reasons.setdefault(' '.join(line['message'].split())[:700], len(reasons) + 1)}")
            elif what in ("named", "WRONG") and "off" in line:
                row.append(f"{what} {line['off']:.0e}{'' if what == 'named' else ' '.join(['', *line['state'][:2]])}")
            else:
                row.append(f"RAW {line['error']}")
        shares = [
            f"{cells[plan]['share']:.0%}" if "share" in cells.get(plan, {}) else "" for plan in ("tensor", "pipeline-2")
        ]
        built = [cells[plan]["build_s"] for plan in plans if "build_s" in cells.get(plan, {})]
        rows.append(f"| {name} | {' | '.join(row)} | {' | '.join(shares)} | {max(built, default=0):.1f} |")
    counts: dict[str, int] = {}
    for cells in seen.values():
        for line in cells.values():
            counts[verdict(line)] = counts.get(verdict(line), 0) + 1
    rows += ["", ", ".join(f"{count} {what}" for what, count in sorted(counts.items())), ""]
    rows += [f"- r{number}: {reason}" for reason, number in reasons.items()]
    return "\n".join(rows)


def main() -> None:
    """See the head of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", help="of these names; default: all")
    parser.add_argument(
        "--families", help="of these packages only: transformers, timm, diffusers, peft, by hand; or further"
    )
    parser.add_argument("--plans", default=",".join(TABLE), help=f"of {', '.join(PLANS)}")
    parser.add_argument("--every", type=int, default=1, help="only each n-th entry, for a sample")
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument(
        "--keep", type=Path, help="a directory for what the ranks write; what is there is not tried again"
    )
    options = parser.parse_args()
    load()
    names: list[str] = options.entries.split(";") if options.entries else list(ENTRIES)
    if options.families or not options.entries:
        families = (options.families or "transformers,timm,diffusers,peft,by hand").split(",")
        names = [name for name in names if ENTRIES[name].family in families]
    names = names[:: options.every]
    plans = options.plans.split(",")
    directory = options.keep or Path(tempfile.mkdtemp(prefix="hocket-zoo-"))
    directory.mkdir(parents=True, exist_ok=True)
    seen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for plan in plans:
        before = finished(directory, plan)[0]
        run(directory, plan, [name for name in names if name not in before])
        for name, line in finished(directory, plan)[0].items():
            if name in seen:
                seen[name][plan] = line
        bad = [name for name in names if verdict(seen[name][plan]) in ("WRONG", "RAW")]
        good = len(names) - len(bad)
        print(
            f"{plan}: {good} of {len(names)} equal, named or refused; others: {', '.join(bad) or 'none'}",
            file=sys.stderr,
            flush=True,
        )
    text = table(seen, plans)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    sys.exit(any(verdict(line) in ("WRONG", "RAW") for cells in seen.values() for line in cells.values()))


if __name__ == "__main__":
    main()
