"""Is what `hocket explain` says would be gained what is gained? A delay is injected, and then taken away for real.

    python -m benchmarks.what_if --seed 1 --runs 20                # as root, for the fabric

Faults are those of `benchmarks.diagnosis` with which a rank, its loader or its link is slow, on one host and on the
fabric. Predicted is by how much the first verdict says that steps would be shorter without the delay; real is by how
much they are: a slow rank or loader is so in every other twenty steps of the same run, so that what else the machine
does is alike with the delay and without; of slow links two runs are compared, one with it and one without.
"""  # noqa: D400

import argparse
import random
import statistics
import tempfile

import numpy as np

from tests.explain import fault_programs

from .diagnosis import FABRIC, FAULTS, STEPS, on_fabric

KINDS = ("compute", "loader", "link (fabric)", "compute (fabric)")
WITHIN = 0.15
BLOCK = 20  # steps with the delay, and as many without it


def gains(fault: str, draw: random.Random) -> tuple[float, float, str]:
    """Return the predicted and the real gain, and what was said."""
    from hocket.explain import Explanation, explain
    from hocket.testing import run_ranks

    _, _, low, high = FAULTS[fault]
    name, fabric = fault.removesuffix(FABRIC), fault.endswith(FABRIC)
    world = draw.randint(3, 4) if fabric else draw.randint(2, 4)
    rank, size = draw.randrange(world), draw.uniform(max(low, 1.0), high)

    def trained(what: str, steps: int, numel: int, every: int) -> Explanation:
        with tempfile.TemporaryDirectory() as folder:
            if fabric:
                on_fabric(world, what, rank, size, folder, numel, steps, every)
            else:
                words = what, rank, steps, size, numel, every
                run_ranks(fault_programs.train, world, *words, env={"HOCKET_RECORD": folder}, timeout_s=240)
            return explain(folder)

    if name == "link":
        with_it, without = (trained(what, STEPS, 60_000, 0) for what in (name, "healthy"))
        assert with_it.parts is not None
        assert without.parts is not None
        before_s, after_s = with_it.parts.step_s, without.parts.step_s
    else:
        with_it = trained(name, 8 * BLOCK, 1, BLOCK)
        assert with_it.parts is not None
        lengths_s = with_it.parts.lengths_s.mean(axis=0)
        quiet = (np.arange(with_it.parts.first - 1, 8 * BLOCK) // BLOCK % 2 == 1)[: len(lengths_s)]
        before_s, after_s = float(lengths_s.mean()), float(lengths_s[quiet].mean())
    told = [one for one in with_it.verdicts if one.kind != "busy machine"]
    said = f"{before_s * 1e3:.1f} ms, without {after_s * 1e3:.1f}: {told[0].sentence if told else 'nothing'}"
    return told[0].gain if told else 0.0, 1.0 - after_s / before_s, said


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, with commas between them")
    given = parser.parse_args()
    draw, kinds, errors = random.Random(given.seed), given.only.split(","), []
    print("| fault | predicted gain | real gain | error | said |\n|---|---|---|---|---|")
    for number in range(given.runs):
        fault = kinds[number % len(kinds)]
        predicted, real, said = gains(fault, random.Random(draw.randrange(2**32)))
        errors.append(predicted / real - 1.0)
        print(f"| {fault} | {predicted:.1%} | {real:.1%} | {errors[-1]:+.1%} | {said} |", flush=True)
    within = sum(abs(error) <= WITHIN for error in errors)
    print(f"\n{within} of {len(errors)} within {WITHIN:.0%}; the median error is {statistics.median(errors):+.1%}.")


if __name__ == "__main__":
    main()
