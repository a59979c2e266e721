"""How many of the published figures that were not fitted lie inside their prediction's 80% interval, by kind.

python benchmarks/predictions/intervals.py
"""

import math

import blind
import edsr
import h100
import language_models
import llama
import nccl
import torchgpipe
import trainings
from plots import table

Case = tuple[float, float]  # predicted by published, and the factor between a prediction and an end of its interval


def cases() -> dict[str, list[Case]]:
    """By kind; nothing that was fitted."""
    constants, where = language_models.CONSTANTS, language_models.network()
    found: dict[str, list[Case]] = {}

    def add(kind: str, ratio: float, one: tuple[float, float]) -> None:
        found.setdefault(kind, []).append((ratio, math.sqrt(one[1] / one[0])))

    for row in language_models.MEGATRON:
        if row.seconds and row.shape not in language_models.CALIBRATION:
            one = language_models.megatron(row, constants, where)[0]
            add("iterations, A100", one.step_s / row.seconds, one.interval_s)
    for each in language_models.KORTHIKANTI:
        for selective, seconds in ((False, each.full_s), (True, each.selective_s)):
            if seconds and f"{each.shape} {'selective' if selective else 'full'}" not in language_models.CALIBRATION:
                one = language_models.recomputed(each, selective, constants, where)
                add("iterations, A100", one.step_s / seconds, one.interval_s)
    for given in language_models.TABLE_2:
        if not given.fitted:
            one = language_models.compared(given)
            add(f"{given.how} at scale", language_models.tflops(one) / given.tflops, one.throughput_interval)
    for run, ratio, times in llama.ratios():
        if not run.fitted:
            add("Llama 3, Float8" if run.narrow else "Llama 3, H100", ratio, (1 / times, times))
    for one in trainings.TRAININGS:
        if not one.name.startswith("Llama 3"):  # it is above
            add("known trainings", *trainings.case(one))
    for one in (*blind.BLIND, *blind.KNOWN):
        if one.tokens:
            program = "Megatron-Core" if one.plan.shard == "optimizer" else "FSDP"
            add(f"{program}, {one.on.partition('-')[0].upper().replace('SELENE', 'A100')}", *trainings.case(one))
    for step in h100.STEPS:
        if step.model not in h100.DERIVED:
            one = h100.predicted(step.model, step.mode)
            add("steps as captured, one H100", 1e3 * one.step_s / step.measured_ms, one.interval_s)
    for name, fit in edsr.fits().items():
        for n, rate in edsr.PUBLISHED[name].items():
            if n > edsr.FITTED_UP_TO:
                add("EDSR, V100", fit.throughput(n) / rate, fit.interval(n))
    *constants_of_stages, times = torchgpipe.fit()
    for row in torchgpipe.ROWS:
        if row not in torchgpipe.FITTED:
            add("pipeline of 8, P40", torchgpipe.rate(row, *constants_of_stages) / row.rate, (1 / times, times))
    for name, points, fitted in (
        ("all-reduce, 8 A100", nccl.A100, nccl.A100_FITTED),
        ("all-reduce, 8 B200", nccl.B200, nccl.B200_FITTED),
    ):
        for size, error in nccl.errors(points, fitted).items():
            if size not in fitted:
                times = nccl.spread(size, fitted)
                add(name, 1 + error, (1 / times, times))
    size, sweep = 4 * nccl.GIB, nccl.fit({size: nccl.B200[size] for size in nccl.B200_FITTED})
    times = nccl.four_hosts_spread(size)
    bus_us = size * 2 * 31 / 32 / nccl.FOUR_HOSTS[size] / 1e3
    add("all-reduce, 4 x 8 B200", nccl.four_hosts(size, sweep) / bus_us, (1 / times, times))
    return found


def inside(found: list[Case]) -> int:
    """How many are inside."""
    return sum(1 / times <= ratio <= times for ratio, times in found)


def report() -> str:
    """The table."""
    found = cases()
    rows = []
    for kind, each in found.items():
        worst = max(each, key=lambda one: abs(math.log(one[0])))[0] - 1
        wide = sorted(times for _, times in each)[len(each) // 2] - 1
        rows.append([kind, str(len(each)), str(inside(each)), f"+-{wide:.0%}", f"{worst:+.0%}"])
    every = [one for each in found.values() for one in each]
    rows.append(["all", str(len(every)), f"{inside(every)} ({inside(every) / len(every):.0%})", "", ""])
    return table(["kind", "predictions", "inside", "median interval", "worst error"], rows)


if __name__ == "__main__":
    print(report())
