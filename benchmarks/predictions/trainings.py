"""Ten known trainings of 7B to 530B parameters: their authors' plan and what it reached, and the planner's own choice.

python benchmarks/predictions/trainings.py

Nothing is fitted here: H100 is the catalogue's h100-like, A100 its selene-like, with the network of each cluster where
that is published. No row was blind: the published figures had been read before.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from plots import table

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Prediction, predict, search
from hocket.workload import LLAMAS, Workload, llama, transformer


@dataclass(frozen=True)
class Training:
    """A training as its authors ran it."""

    name: str
    workload: Workload
    on: str  # of the catalogue
    workers: int
    batch: int  # samples of a global batch
    plan: Plan
    source: str
    tokens: float = 0.0  # per second and device, or
    mfu: float = 0.0  # that, or
    tflops: float = 0.0  # per device
    hardware: bool = False  # TFLOP/s with the forward pass that is done again
    host_Bps: float = 0.0  # what the network gives each host, where it is not the catalogue's
    memory_nbytes: int = 0  # of a device, where it is not the catalogue's
    assumed: str = ""  # what is not published

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return int(self.workload.name.rpartition("s")[2])

    @property
    def where(self) -> Network:
        """The cluster."""
        made = Network.of(cluster.load(self.on))
        if self.host_Bps:
            made = dataclasses.replace(made, host_Bps=self.host_Bps, rank_Bps=min(made.rank_Bps, self.host_Bps))
        return dataclasses.replace(made, memory_nbytes=self.memory_nbytes or made.memory_nbytes)

    def published(self, one: Prediction) -> float:
        """Return the MFU that they reached, by the planner's count of FLOPs."""
        peak = one.device_flops
        if self.tokens:
            return self.tokens / self.sequence * one.flops / peak
        if self.tflops:
            return self.tflops * 1e12 / peak * (0.75 if self.hardware else 1.0)
        return self.mfu


def _fused(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int = 50368) -> Workload:
    """Return a transformer with flash attention and a feed-forward layer of 8 h^2 parameters."""
    return llama(
        hidden, layers, heads, heads, 8 * hidden // 3, vocabulary=vocabulary, sequence=sequence, name=f"s{sequence}"
    )


def _scored(hidden: int, layers: int, heads: int, vocabulary: int = 51200) -> Workload:
    """Return a transformer of before 2023, that keeps attention's scores; sequences of 2,048."""
    return transformer(hidden, layers, heads, vocabulary=vocabulary, name="s2048")


def _mpt(accumulate: int, recompute: bool) -> Plan:
    return Plan(shard="parameters", accumulate=accumulate, recompute=recompute, precision="bfloat16")


def _deep(tensor: int, pipeline: int, micro_batches: int, **more: Any) -> Plan:
    return Plan(
        tensor_parallel_degree=tensor, pipeline_parallel_degree=pipeline, micro_batches=micro_batches,
        precision="bfloat16", **more,
    )  # fmt: skip


_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_LLAMA = llama(*LLAMAS["405b"], sequence=8192, name="s8192")
_TURNS: dict[str, Any] = {"stages_per_rank": 4, "pipeline_schedule": "interleaved", "sequence_parallel": True}
TRAININGS = (
    Training("MPT-7B", _fused(4096, 32, 32, 2048), "h100-like", 8, 48, _mpt(1, False), _FOUNDRY, tokens=10643),
    Training("MPT-13B", _fused(5120, 40, 40, 2048), "h100-like", 64, 128, _mpt(1, False), _FOUNDRY, tokens=4800),
    Training(
        "GPT-NeoX-20B", _scored(6144, 44, 64), "selene-like", 96, 1538,
        _deep(2, 4, 32, shard="optimizer", recompute=True),
        "arXiv:2204.06745", tflops=117, hardware=True, memory_nbytes=40 * 10**9, assumed="micro-batches of 4",
    ),
    Training("MPT-30B", _fused(7168, 48, 56, 2048), "h100-like", 32, 1344, _mpt(3, True), _FOUNDRY, tokens=2308),
    Training(
        "LLaMA-65B", _fused(8192, 80, 64, 2048, 32000), "selene-like", 2048, 2048,
        _deep(8, 1, 1, shard="parameters", sequence_parallel=True), "arXiv:2302.13971", tokens=380,
        assumed="its plan: 8 tensor x 256 data",
    ),
    Training("MPT-70B", _fused(8192, 80, 64, 2048), "h100-like", 64, 2048, _mpt(4, True), _FOUNDRY, tokens=1039),
    Training(
        "OPT-175B", _scored(12288, 96, 96), "selene-like", 992, 992,
        _deep(8, 1, 1, shard="parameters", recompute=True), "arXiv:2205.01068", tflops=147, hardware=True,
        assumed="8 samples a part",
    ),
    Training(
        "BLOOM-176B", _scored(14336, 70, 112, 250880), "selene-like", 384, 2048,
        _deep(4, 12, 128, shard="optimizer", recompute=True), "arXiv:2211.05100", tflops=150, hardware=True,
        host_Bps=4 * 12.5e9,
    ),
    Training(
        "Llama 3 405B", _LLAMA, "h100-like", 16384, 2048, _deep(8, 16, 16, shard="optimizer", **_TURNS),
        "arXiv:2407.21783, table 4", mfu=0.41, assumed="4 stages a rank",
    ),
    Training(
        "MT-NLG 530B", _scored(20480, 105, 128), "selene-like", 2240, 1920, _deep(8, 35, 240, recompute=True),
        "arXiv:2201.11990", tflops=126, hardware=True,
    ),
)  # fmt: skip


def predicted(one: Training) -> Prediction:
    """Return what the authors' plan takes."""
    return predict(
        one.plan,
        one.workload,
        one.where,
        workers=one.workers,
        batch=one.batch,
        constants=Constants.of(one.where.reached),
    )


def case(one: Training) -> tuple[float, tuple[float, float]]:
    """Return predicted by published, and the factors between a prediction and the ends of its interval."""
    said = predicted(one)
    times = said.interval_s[1] / said.step_s
    return said.mfu / one.published(said), (1 / times, times)


def report() -> str:
    """Return the table."""
    rows = []
    for one in TRAININGS:
        said, where = predicted(one), one.where
        chosen = search(one.workload, where, workers=one.workers, batch=one.batch).best
        reached = one.published(said)
        times = said.interval_s[1] / said.step_s
        note = f"; assumed: {one.assumed}" if one.assumed else ""
        rows.append([
            one.name, f"{one.workers} {one.on.partition('-')[0]}", f"{said.plan.describe()}{note}", f"{reached:.0%}",
            f"{said.mfu:.0%}", f"{said.mfu / times:.0%} to {said.mfu * times:.0%}", f"{said.mfu / reached - 1:+.0%}",
            f"{said.memory.total / 2**30:.0f}", chosen.plan.describe(), f"{chosen.mfu:.0%}",
            f"{chosen.memory.total / 2**30:.0f}", one.source,
        ])  # fmt: skip
    head = [
        "training", "devices", "their plan", "MFU reached", "predicted", "80% within", "error", "GiB",
        "the planner's plan", "MFU", "GiB", "source",
    ]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    print(report())
