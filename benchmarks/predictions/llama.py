"""Llama 3, predicted on catalogue clusters: torchtitan's published runs, and the 405B of its authors.

python benchmarks/predictions/llama.py

Fitted is one share of a device: what products reach, on the first compiled run in bfloat16 of torchtitan's H100, which
have a power limit of 500 W and slower memory than the catalogue's, of B200 (limited in power, too) and of MI300X. What
torch.compile fuses is counted, not fitted (`fused_share`), and of Float8 nothing is fitted. None of it was blind: the
authors' figures had been read before.

torchtitan: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan (see also arXiv:2410.06511), tables 1, 3,
4 and 5, and benchmarks/llama3_8b_h200_2025-06_torchtitan.md. Of table 4 the row without AsyncTP, which is not modelled;
table 5 has it. That does not say in how many micro-batches pipelines cut: as many as they have ranks, as torchtitan
does where nothing else is said. torchao: the benchmarks of quantized training in pytorch/ao's documentation, whose H100
are taken for torchtitan's. Llama 3: arXiv:2407.21783, table 4.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from plots import table

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Prediction, predict
from hocket.workload import LLAMAS, llama

SEQUENCE, GIB = 8192, 2**30 / 10**9


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
    compiled: bool = True  # by torch.compile, where the kernels of PyTorch's operators are counted
    on: str = "h100-like"  # of the catalogue

    @property
    def titan(self) -> bool:
        """Whether it ran on torchtitan's H100."""
        return not self.mfu and self.on == "h100-like"

    @property
    def narrow(self) -> bool:
        """Whether linear layers are in float8."""
        return self.plan.precision == "float8"


def _fsdp(**more: Any) -> Plan:
    return Plan(**{"shard": "parameters", "recompute": True, "precision": "bfloat16", **more})


def _deep(micro_batches: int) -> Plan:
    """Llama 3's: tensor 8, pipeline 16 with stages of some layers in turns, optimizer and gradients sharded."""
    return Plan(
        shard="optimizer", tensor_parallel_degree=8, pipeline_parallel_degree=16, sequence_parallel=True,
        micro_batches=micro_batches, stages_per_rank=4, pipeline_schedule="interleaved",
    )  # fmt: skip


_TP: dict[str, Any] = {"tensor_parallel_degree": 8, "sequence_parallel": True}
_PP: dict[str, Any] = {**_TP, "pipeline_parallel_degree": 8, "micro_batches": 8}
_SOME: dict[str, Any] = {"recompute_part": "attention"}
_F8: dict[str, Any] = {"precision": "float8"}
_V: dict[str, Any] = {"stages_per_rank": 2, "pipeline_schedule": "interleaved"}
_GRADIENTS = Plan(shard="gradients", recompute=True, **_PP, **_F8)
RUNS = (
    Run("FSDP", "8b", 8, 16, _fsdp(**_SOME), 5762, 0, 82.4, compiled=False),
    Run("compiled", "8b", 8, 16, _fsdp(**_SOME), 6667, 0, 77.0, fitted=True),
    Run("compiled, Float8", "8b", 8, 16, _fsdp(**_SOME, **_F8), 8532, 0, 76.8),
    Run("FSDP", "8b", 128, 256, _fsdp(**_SOME), 5605, 0, 67.0, compiled=False),
    Run("compiled", "8b", 128, 256, _fsdp(**_SOME), 6514, 0, 62.0),
    Run("compiled, Float8", "8b", 128, 256, _fsdp(**_SOME, **_F8), 8380, 0, 61.8),
    Run("FSDP x TP, compiled, Float8", "70b", 256, 512, _fsdp(**_TP, **_F8), 829, 0, 71.9),
    Run("FSDP x TP x PP, compiled, Float8", "405b", 512, 256, _GRADIENTS, 100, 0, 82.5),
    Run("the same, interleaved", "405b", 512, 256, dataclasses.replace(_GRADIENTS, **_V), 128, 0, 72.7),
    Run("TP 8, PP 16, DP 64", "405b", 8192, 2048, _deep(32), mfu=0.43, compiled=False),
    Run("TP 8, PP 16, DP 128", "405b", 16384, 2048, _deep(16), mfu=0.41, compiled=False),
    Run("compiled", "8b", 8, 8, _fsdp(**_SOME), 6150, 0, 47.65 / GIB),
    Run("compiled, Float8", "8b", 8, 8, _fsdp(**_SOME, **_F8), 7689.5, 0, 47.77 / GIB),
    Run("compiled, Float8", "8b", 32, 64, _fsdp(**_SOME, **_F8), 10938, 0, 47.96, on="h200-like"),
    Run("compiled, Float8", "8b", 64, 128, _fsdp(**_SOME, **_F8), 10753, 0, 46.97, on="h200-like"),
    Run("compiled", "8b", 8, 8, _fsdp(**_SOME), 8307.5, 0, 33.71 / GIB, on="b200-like", fitted=True),
    Run("compiled, Float8", "8b", 8, 8, _fsdp(**_SOME, **_F8), 10417, 0, 33.38 / GIB, on="b200-like"),
    Run("compiled", "8b", 8, 8, _fsdp(**_SOME), 5376.5, 0, 39.09 / GIB, on="mi300x-like", fitted=True),
    Run("compiled, Float8", "8b", 8, 8, _fsdp(**_SOME, **_F8), 6166, 0, 39.07 / GIB, on="mi300x-like"),
)


@functools.cache
def where(on: str, titan: bool) -> Network:
    """The cluster; torchtitan's H100 have 96 GB and 2.4 TB/s."""
    made = Network.of(cluster.load(on))
    return dataclasses.replace(made, memory_Bps=2.4e12, memory_nbytes=96 * 10**9) if titan else made


@functools.cache
def fused_share() -> float:
    """Of what kernels that only read and write move in 8B, the part that torch.compile takes away, counted.

    It compiles each block. What is left of its kernels: the first norm reads and writes; queries are turned, keys and
    values turned and copied for the heads that share them, in one kernel each; the second norm is one with the residual
    before it, SwiGLU is one kernel, and the last residual is added.
    """
    hidden, layers, heads, kv_heads, feed_forward = LLAMAS["8b"]
    found = llama(hidden, layers, heads, kv_heads, feed_forward, sequence=SEQUENCE, eager=True)
    every = sum(one.moved_bytes for layer in found.layers for one in layer.operations if not one.flops)
    block = sum(one.moved_bytes for one in found.layers[1].operations if not one.flops)
    left = SEQUENCE * (hidden * (4 + (8 + 4 * kv_heads / heads) + 8 + 6) + 6 * feed_forward)
    return layers * (block - left) / every


def predicted(run: Run, share: float | None = None) -> Prediction:
    """A run's prediction; `share` is what products reach of the data sheet, if not what is fitted or assumed."""
    network = where(run.on, run.titan)
    if share is None and not run.mfu and any(one.on == run.on and one.fitted for one in RUNS):
        share = fit(run.on)
    told = {"fused_share": fused_share()} if run.compiled else {}
    constants = Constants.of({**network.reached, **told})
    if share:
        constants = dataclasses.replace(constants, matmul_share=share, basis="fitted", fitted_workers=8)
    workload = llama(*LLAMAS[run.shape], name=run.shape, sequence=SEQUENCE, eager=not run.mfu)
    return predict(run.plan, workload, network, workers=run.workers, batch=run.batch, constants=constants)


@functools.cache
def fit(on: str) -> float:
    """The share of a kind of devices, on their first compiled run."""
    from scipy.optimize import brentq

    run = next(run for run in RUNS if run.fitted and run.on == on)
    found: float = brentq(lambda share: tokens(predicted(run, share)) / run.tokens - 1, 0.1, 0.9, xtol=1e-3)
    return found


def tokens(one: Prediction) -> float:
    """Tokens per second and device."""
    return one.throughput * SEQUENCE / one.workers


def ratios() -> list[tuple[Run, float, float]]:
    """Of every run, predicted by published, and the factor between a prediction and an end of its interval."""
    found = []
    for run in RUNS:
        one = predicted(run)
        ratio = tokens(one) / run.tokens if run.tokens else one.mfu / run.mfu
        found.append((run, ratio, one.interval_s[1] / one.step_s))
    return found


def report() -> str:
    """The table."""
    rows = []
    for run, ratio, _ in ratios():
        one = predicted(run)
        low, high = (rate * SEQUENCE / one.workers for rate in one.throughput_interval)
        said = f"{run.tokens:.0f}" if run.tokens else f"MFU {run.mfu:.0%}"
        inside = "" if run.fitted else "yes" if low <= tokens(one) / ratio <= high else "no"
        memory = f"{one.memory.total / 2**30:.0f}" + (f" ({run.memory_gib:.0f})" if run.memory_gib else "")
        where_run = f"{run.shape}, {run.workers} {run.on.removesuffix('-like')}"
        rows.append([
            where_run, run.name, said, f"{tokens(one):.0f}", f"{low:.0f} to {high:.0f}",
            "fitted" if run.fitted else f"{ratio - 1:+.0%}", inside, "" if run.narrow else f"{one.mfu:.0%}", memory,
        ])  # fmt: skip
    head = [
        "model, devices", "plan", "published tokens/s a device", "predicted", "80% within", "error", "inside", "MFU",
        "GiB (published)",
    ]  # fmt: skip
    shares = ", ".join(f"{fit(run.on):.1%} ({run.on.removesuffix('-like')})" for run in RUNS if run.fitted)
    said = (
        f"Fitted: products reach {shares} of the data sheet. Counted: torch.compile takes away {fused_share():.0%} of "
    )
    return table(head, rows) + f"\n\n{said}what kernels that only read and write move."


if __name__ == "__main__":
    print(report())
