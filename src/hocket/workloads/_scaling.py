"""How much faster n workers are than one, measured fairly.

Weak scaling: a worker has the same cores and the same number of samples per step whether it is alone or one of n. The
blocks of n and of one alternate, so that a change in the machine's speed meets both; while one worker runs alone the
others wait in a barrier, and how much of a core they use there is measured and reported.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import hocket
from hocket.workloads._training import Trainee

_BLOCK_S = 2.0
_ROUNDS = 3
_SLOW_STEP_S = 5.0  # one round has to do when a step takes longer


def measure(together: Trainee, alone: Trainee | None, *, step_s: float, budget_s: float) -> dict[str, Any]:
    """Return the samples per second of n workers together and of one alone; called by every worker, with one answer.

    `alone` trains without communication on its share of a batch, on the first worker and there only. Steps are expected
    to take `step_s` seconds, and the whole about `budget_s`, unless single steps take longer; both are the same on
    every worker.

    Returns:
        JSON values: "efficiency" (samples/s of n over n times samples/s of one: medians), its lowest and highest round,
        "samples_per_s", "one_samples_per_s", "idle_core_share" (largest share of a core that a waiting worker used),
        "rounds" and "steps_per_block".
    """
    world = dist.get_world_size()
    rounds = 1 if step_s > _SLOW_STEP_S else _ROUNDS
    steps = max(1, round(min(_BLOCK_S, budget_s / (2 * rounds)) / step_s))
    if alone is not None:
        alone.step()  # the first step of a module sets up its kernels and the optimizer's state
    rates, rates_alone, busy = [], [], []
    for _ in range(rounds):
        dist.barrier()
        begin_s = time.perf_counter()
        samples = sum(together.step()[0] for _ in range(steps))
        together.synchronise()
        mine = torch.tensor([float(samples), time.perf_counter() - begin_s], dtype=torch.float64)
        samples_of_all, seconds_of_all = hocket.total(mine).tolist()
        rates.append(samples_of_all / (seconds_of_all / world))

        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        rate = 0.0
        if alone is not None:
            samples = sum(alone.step()[0] for _ in range(steps))
            alone.synchronise()
            rate = samples / (time.perf_counter() - begin_s)
        dist.barrier()
        busy_share = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
        shares = torch.zeros(world, dtype=torch.float64)
        shares[dist.get_rank()] = busy_share if alone is None else rate
        first, *others = hocket.total(shares).tolist()
        rates_alone.append(first)
        busy.append(max(others))
    rounds_of = [n / (world * one) for n, one in zip(rates, rates_alone, strict=True)]
    samples_per_s, one_samples_per_s = statistics.median(rates), statistics.median(rates_alone)
    return {
        "workers": world,
        "efficiency": samples_per_s / (world * one_samples_per_s),
        "efficiency_lowest": min(rounds_of),
        "efficiency_highest": max(rounds_of),
        "samples_per_s": samples_per_s,
        "one_samples_per_s": one_samples_per_s,
        "idle_core_share": max(busy),
        "rounds": rounds,
        "steps_per_block": steps,
    }
