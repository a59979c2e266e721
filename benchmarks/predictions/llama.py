"""Llama 3 on H100, predicted on the catalogue's h100-like: torchtitan's published runs, and the 405B of its authors.

python benchmarks/predictions/llama.py

Nothing is fitted but one share, for torchtitan: its devices have a power limit of 500 W and slower memory than the
catalogue's, and what products reach of the data sheet there is fitted on its first compiled run. None of it was blind:
the authors' figures had been read before, though the model was not changed after its predictions were compared.

torchtitan: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan (see also arXiv:2410.06511); runs with
torch.compile or, for Float8, which is not modelled, as upper bounds of what bfloat16 would reach. Llama 3:
arXiv:2407.21783, table 4.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from plots import table

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Prediction, predict
from hocket.workload import LLAMAS, llama

SEQUENCE = 8192


@dataclass(frozen=True)
class Run:
    """A published run; `tokens` are per second and device, `mfu` stands instead where that is published."""

    name: str
    shape: str
    workers: int
    batch: int  # samples of a global batch
    plan: Plan
    tokens: float = 0.0
    mfu: float = 0.0
    memory_gib: float = 0.0
    fitted: bool = False
    note: str = ""

    @property
    def titan(self) -> bool:
        """Whether it ran on torchtitan's devices."""
        return not self.mfu


def _fsdp(**more: Any) -> Plan:
    return Plan(shard="parameters", recompute=True, **more)


def _deep(micro_batches: int) -> Plan:
    """Llama 3's: tensor 8, pipeline 16 with stages of some layers in turns, optimizer and gradients sharded."""
    return Plan(
        shard="optimizer", tensor_parallel_degree=8, pipeline_parallel_degree=16, sequence_parallel=True,
        micro_batches=micro_batches, stages_per_rank=4, pipeline_schedule="interleaved",
    )  # fmt: skip


_TP: dict[str, Any] = {"tensor_parallel_degree": 8, "sequence_parallel": True}
_PP: dict[str, Any] = {**_TP, "pipeline_parallel_degree": 8, "micro_batches": 32}
_SOME: dict[str, Any] = {"recompute_part": "attention"}
_V: dict[str, Any] = {"stages_per_rank": 2, "pipeline_schedule": "interleaved"}
_GRADIENTS = Plan(shard="gradients", recompute=True, **_PP)
RUNS = (
    Run("FSDP, compiled", "8b", 8, 16, _fsdp(**_SOME), 6667, 0, 77.0, fitted=True),
    Run("FSDP, compiled", "8b", 128, 256, _fsdp(**_SOME), 6514, 0, 62.0),
    Run("FSDP x TP, Float8", "70b", 256, 512, _fsdp(**_TP), 829, 0, 71.9, note="Float8"),
    Run("FSDP x TP x PP, Float8", "405b", 512, 256, _GRADIENTS, 100, 0, 82.5, note="Float8"),
    Run("the same, interleaved", "405b", 512, 256, dataclasses.replace(_GRADIENTS, **_V), 128, 0, 72.7, note="Float8"),
    Run("TP 8, PP 16, DP 64", "405b", 8192, 2048, _deep(32), mfu=0.43),
    Run("TP 8, PP 16, DP 128", "405b", 16384, 2048, _deep(16), mfu=0.41),
)


def where(titan: bool) -> Network:
    """The cluster; torchtitan's devices have 96 GB and 2.4 TB/s."""
    made = Network.of(cluster.load("h100-like"))
    return dataclasses.replace(made, memory_Bps=2.4e12, memory_nbytes=96 * 10**9) if titan else made


def predicted(run: Run, share: float = 0.0) -> Prediction:
    """A run's prediction; `share` is what products reach of the data sheet, where it is not the cluster's own."""
    network = where(run.titan)
    constants = Constants.of(network.reached)
    if share:
        constants = dataclasses.replace(constants, matmul_share=share, basis="fitted", fitted_workers=8)
    workload = llama(*LLAMAS[run.shape], name=run.shape, sequence=SEQUENCE)
    return predict(run.plan, workload, network, workers=run.workers, batch=run.batch, constants=constants)


def fit() -> float:
    """The share of torchtitan's devices, on its first compiled run."""
    from scipy.optimize import brentq

    run = next(run for run in RUNS if run.fitted)
    found: float = brentq(lambda share: tokens(predicted(run, share)) / run.tokens - 1, 0.2, 0.9, xtol=1e-3)
    return found


def tokens(one: Prediction) -> float:
    """Tokens per second and device."""
    return one.throughput * SEQUENCE / one.workers


def ratios() -> list[tuple[Run, float, float]]:
    """Of every run, predicted by published, and the factor between a prediction and an end of its interval."""
    share = fit()
    found = []
    for run in RUNS:
        one = predicted(run, share if run.titan else 0.0)
        ratio = tokens(one) / run.tokens if run.tokens else one.mfu / run.mfu
        found.append((run, ratio, one.interval_s[1] / one.step_s))
    return found


def report() -> str:
    """The table."""
    share = fit()
    rows = []
    for run, ratio, _ in ratios():
        one = predicted(run, share if run.titan else 0.0)
        low, high = (rate * SEQUENCE / one.workers for rate in one.throughput_interval)
        said = f"{run.tokens:.0f}" if run.tokens else f"MFU {run.mfu:.0%}"
        inside = "" if run.fitted else "yes" if low <= tokens(one) / ratio <= high else "no"
        memory = f"{one.memory.total / 2**30:.0f}" + (f" ({run.memory_gib:.0f})" if run.memory_gib else "")
        rows.append([
            f"{run.shape}, {run.workers}", run.name, said, f"{tokens(one):.0f}", f"{low:.0f} to {high:.0f}",
            "fitted" if run.fitted else f"{ratio - 1:+.0%}", inside, f"{one.mfu:.0%}", memory,
        ])  # fmt: skip
    head = [
        "model, devices", "plan", "published tokens/s a device", "predicted", "80% within", "error", "inside", "MFU",
        "GiB (published)",
    ]  # fmt: skip
    return table(head, rows) + f"\n\nFitted: products reach {share:.1%} of 989 TFLOP/s on torchtitan's devices."


if __name__ == "__main__":
    print(report())
