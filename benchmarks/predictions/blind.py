"""Published trainings, predicted before their figures were read: 47 layouts of llm-foundry, NeMo, NVIDIA and AMD.

python benchmarks/predictions/blind.py

Layouts were read from files without figures: the scripts with which llm-foundry and NeMo start
their benchmarks, the configurations of Primus, the tables of layouts of NVIDIA's recipes. Of the others, which tables
float8, of Llama 3 70B by another layout and of Nemotron-4 340B on 128 H100 had been seen; those layouts are not here.

Rules for all rows, fixed beforehand: the cluster is the catalogue's as it is; a feed-forward layer without a gate is one
with a gate of as many parameters; Megatron's distributed optimizer is a sharded optimizer; sequences are divided wherever
tensors are; communication that these programs hide behind products of divided tensors is not modelled.
"""

from trainings import Training, predicted

from hocket.planner import Plan
from hocket.workload import LLAMAS, Workload, llama


def _plain(
    hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, *, kv: int = 0, wide: int = 0
) -> Workload:
    """Return a transformer whose feed-forward layer has no gate, of 4 times its hidden size unless `wide` says more."""
    gated = round(2 * (wide or 4 * hidden) / 3)
    return llama(
        hidden, layers, heads, kv or heads, gated, vocabulary=vocabulary, sequence=sequence, name=f"s{sequence}"
    )


_MPT = {"1B": (2048, 24, 16), "3B": (2560, 32, 20), "7B": (4096, 32, 32), "13B": (5120, 40, 40), "30B": (7168, 48, 56)}
_MPT["70B"] = (8192, 80, 64)


def _mpt(
    size: str,
    on: str,
    workers: int,
    micro: int,
    parts: int,
    *,
    sequence: int = 2048,
    again: bool = False,
    fp8: bool = False,
) -> Training:
    plan = Plan(shard="parameters", accumulate=parts, recompute=again, precision="float8" if fp8 else "bfloat16")
    name = f"MPT-{size}, {sequence} tokens{', fp8' if fp8 else ''}"
    work = _plain(*_MPT[size], sequence, 50368)
    return Training(name, work, on, workers, workers * micro * parts, plan, "llm-foundry, sweep.sh")


def _megatron(
    name: str, work: Workload, on: str, workers: int, batch: int, tensor: int, deep: int, turns: int, micro: int,
    source: str, *, fp8: bool = False,
) -> Training:  # fmt: skip
    """Return a run of Megatron-Core: a sharded optimizer, interleaved stages, divided sequences."""
    parts = batch // (workers // tensor // deep) // micro
    plan = Plan(
        shard="optimizer", tensor_parallel_degree=tensor, sequence_parallel=tensor > 1, pipeline_parallel_degree=deep,
        micro_batches=parts if deep > 1 else 1, accumulate=parts if deep == 1 else 1, stages_per_rank=turns,
        pipeline_schedule="interleaved" if turns > 1 else "1f1b", precision="float8" if fp8 else "bfloat16",
    )  # fmt: skip
    return Training(name + (", fp8" if fp8 else ""), work, on, workers, batch, plan, source)


_GPT3 = _plain(12288, 96, 96, 2048, 51200)
_NEMOTRON_15B = _plain(6144, 32, 48, 4096, 256000, kv=8, wide=24576)
_NEMOTRON_340B = _plain(18432, 96, 96, 4096, 256000, kv=8, wide=73728)
_NEMOTRON_22B = _plain(6144, 40, 48, 4096, 256000)
_NEMOTRON_8B = _plain(4096, 32, 32, 4096, 256000)
_LLAMA_8B = llama(*LLAMAS["8b"], sequence=8192, name="s8192")
_LLAMA_70B = llama(*LLAMAS["70b"], sequence=8192, name="s8192")
_LLAMA2_7B = llama(4096, 32, 32, 32, 11008, vocabulary=32000, sequence=4096, name="s4096")
_LLAMA2_70B = llama(8192, 80, 64, 8, 28672, vocabulary=32000, sequence=4096, name="s4096")
_QWEN_7B = llama(3584, 28, 28, 4, 18944, vocabulary=152064, sequence=2048, name="s2048")
_NEMO, _DGXC, _PRIMUS = "NeMo, model_configs.csv", "dgxc-benchmarking, nemotron4", "Primus, MI300X/*-BF16-pretrain.yaml"
_A, _H, _B, _M = "selene-like", "h100-like", "b200-like", "mi300x-like"


def _fsdp(name: str, work: Workload, workers: int, batch: int, source: str) -> Training:
    plan = Plan(shard="parameters", recompute=True, precision="bfloat16")
    return Training(name, work, _M, workers, batch, plan, source)


BLIND = (
    _mpt("1B", _A, 8, 14, 1),
    _mpt("3B", _A, 8, 10, 2),
    _mpt("7B", _A, 8, 6, 1),
    _mpt("30B", _A, 8, 3, 21, again=True),
    _mpt("3B", _A, 64, 6, 3),
    _mpt("30B", _A, 64, 16, 3, again=True),
    _mpt("70B", _A, 64, 8, 4, again=True),
    _mpt("7B", _A, 8, 8, 2, sequence=8192, again=True),
    _mpt("7B", _A, 8, 2, 2, sequence=32768, again=True),
    _mpt("1B", _H, 8, 14, 1),
    _mpt("3B", _H, 8, 10, 2),
    _mpt("30B", _H, 8, 3, 21, again=True),
    _mpt("70B", _H, 32, 2, 16, again=True),
    _mpt("7B", _H, 8, 8, 2, sequence=8192, again=True),
    _mpt("7B", _H, 8, 2, 2, sequence=32768, again=True),
    _mpt("7B", _H, 8, 6, 1, fp8=True),
    _mpt("30B", _H, 8, 3, 21, again=True, fp8=True),
    _megatron("GPT-3 175B", _GPT3, _H, 128, 256, 4, 8, 6, 1, _NEMO),
    _megatron("Llama 3 70B", _LLAMA_70B, _H, 64, 128, 4, 8, 5, 1, _NEMO, fp8=True),
    _megatron("Nemotron-3 8B", _NEMOTRON_8B, _H, 8, 32, 2, 1, 1, 2, _NEMO),
    _megatron("Nemotron-3 22B", _NEMOTRON_22B, _H, 64, 256, 2, 4, 10, 1, _NEMO),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _H, 64, 256, 2, 1, 1, 2, _NEMO),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _H, 64, 256, 2, 1, 1, 2, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _H, 256, 64, 8, 8, 12, 1, _NEMO),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _H, 256, 64, 8, 8, 12, 1, _NEMO, fp8=True),
    _megatron("Nemotron-4 15B, batch 1024", _NEMOTRON_15B, _H, 64, 1024, 4, 1, 1, 4, _NEMO, fp8=True),
    _megatron("Nemotron-4 15B, batch 1024", _NEMOTRON_15B, _H, 1024, 1024, 4, 1, 1, 4, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B, batch 512", _NEMOTRON_340B, _H, 128, 512, 8, 8, 12, 1, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B, batch 512", _NEMOTRON_340B, _H, 1024, 512, 8, 8, 12, 1, _NEMO, fp8=True),
    _megatron("GPT-3 175B", _GPT3, _B, 128, 256, 4, 4, 12, 2, _NEMO),
    _megatron("GPT-3 175B", _GPT3, _B, 128, 256, 4, 4, 12, 2, _NEMO, fp8=True),
    _megatron("Llama 3 8B", _LLAMA_8B, _B, 8, 128, 1, 1, 1, 2, _NEMO),
    _megatron("Llama 3 8B", _LLAMA_8B, _B, 8, 128, 1, 1, 1, 2, _NEMO, fp8=True),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _B, 64, 256, 1, 1, 1, 2, _NEMO),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _B, 64, 256, 1, 1, 1, 2, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _B, 128, 32, 8, 4, 12, 1, _NEMO),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _B, 128, 32, 8, 4, 12, 1, _NEMO, fp8=True),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 16, 64, 2, 1, 1, 2, _DGXC),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 128, 512, 2, 1, 1, 2, _DGXC),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 1024, 4096, 2, 1, 1, 2, _DGXC),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 2048, 8192, 2, 1, 1, 2, _DGXC),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 1024, 4096, 2, 1, 1, 2, _DGXC, fp8=True),
    _megatron("Llama 3.1 8B", _LLAMA_8B, _M, 8, 128, 1, 1, 1, 2, _PRIMUS),
    _megatron("Llama 2 7B", _LLAMA2_7B, _M, 8, 256, 1, 1, 1, 4, _PRIMUS),
    _megatron("Qwen2.5 7B", _QWEN_7B, _M, 8, 640, 1, 1, 1, 10, _PRIMUS),
    _fsdp("Llama 3.1 70B", _LLAMA_70B, 8, 8, _PRIMUS),
    _fsdp("Llama 2 70B", _LLAMA2_70B, 8, 56, _PRIMUS),
)


def report() -> str:
    """Return the table."""
    from plots import table

    rows = []
    for one in BLIND:
        said = predicted(one)
        tokens = said.throughput * one.sequence / one.workers
        times = said.interval_s[1] / said.step_s
        rows.append([
            one.name, f"{one.workers} {one.on.removesuffix('-like')}", f"{one.batch}", said.plan.describe(),
            f"{tokens:.0f}", f"{tokens / times:.0f} to {tokens * times:.0f}", f"{tokens * said.flops / one.sequence / 1e12:.0f}",
            f"{said.mfu:.1%}", f"{said.memory.total / 2**30:.0f}", one.source,
        ])  # fmt: skip
    head = [
        "training",
        "devices",
        "batch",
        "plan",
        "tokens/s a device",
        "80% within",
        "TFLOP/s",
        "MFU",
        "GiB",
        "layout from",
    ]
    return table(head, rows)


if __name__ == "__main__":
    print(report())
