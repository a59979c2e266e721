"""Published trainings, predicted before their figures were read: 47 layouts of llm-foundry, NeMo, NVIDIA and AMD.

python benchmarks/predictions/blind.py

Of those whose figure was found the error is printed. The commit before the figures' has what was said without them.
Layouts were read from files without figures: the scripts with which llm-foundry and NeMo start their benchmarks, the
configurations of Primus, the table of layouts of a recipe of DGX Cloud. Figures in float8 of GPT-3 175B, Llama 3 70B
and Nemotron-4 340B on H100 had been seen, by other layouts or of other numbers of devices than these.

Rules for all rows, fixed beforehand: the cluster is the catalogue's as it is; a feed-forward layer without a gate is
one with a gate of as many parameters; Megatron's distributed optimizer is a sharded optimizer; sequences are divided
wherever tensors are; what these programs hide behind products of divided tensors is not modelled. Where a layout has
several figures, they are of the table that has the most sizes of it, and else the newest. Three figures are of layouts
that differ a little from what the scripts say (GPT-3 175B has twelve turns instead of six, MPT-1B and 7B accumulate
four and two parts on A100 instead of one); the layouts are the figures' here, which changes no prediction by 2%.
"""

import dataclasses
from typing import Any

from plots import table
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
    tokens: float = 0.0,
) -> Training:
    plan = Plan(shard="parameters", accumulate=parts, recompute=again, precision="float8" if fp8 else "bfloat16")
    name = f"MPT-{size}, {sequence} tokens{', fp8' if fp8 else ''}"
    work = _plain(*_MPT[size], sequence, 50368)
    return Training(name, work, on, workers, workers * micro * parts, plan, "llm-foundry, sweep.sh", tokens=tokens)


def _megatron(
    name: str, work: Workload, on: str, workers: int, batch: int, tensor: int, deep: int, turns: int, micro: int,
    source: str, *, fp8: bool = False, tokens: float = 0.0,
) -> Training:  # fmt: skip
    """Return a run of Megatron-Core: a sharded optimizer, interleaved stages, divided sequences."""
    parts = batch // (workers // tensor // deep) // micro
    plan = Plan(
        shard="optimizer", tensor_parallel_degree=tensor, sequence_parallel=tensor > 1, pipeline_parallel_degree=deep,
        micro_batches=parts if deep > 1 else 1, accumulate=parts if deep == 1 else 1, stages_per_rank=turns,
        pipeline_schedule="interleaved" if turns > 1 else "1f1b", precision="float8" if fp8 else "bfloat16",
    )  # fmt: skip
    return Training(name + (", fp8" if fp8 else ""), work, on, workers, batch, plan, source, tokens=tokens)


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
    _mpt("1B", _A, 8, 14, 4, tokens=20513),
    _mpt("3B", _A, 8, 10, 2, tokens=10811),
    _mpt("7B", _A, 8, 6, 2, tokens=4641),
    _mpt("30B", _A, 8, 3, 21, again=True, tokens=916),
    _mpt("3B", _A, 64, 6, 3),
    _mpt("30B", _A, 64, 16, 3, again=True),
    _mpt("70B", _A, 64, 8, 4, again=True, tokens=410),
    _mpt("7B", _A, 8, 8, 2, sequence=8192, again=True, tokens=3206),
    _mpt("7B", _A, 8, 2, 2, sequence=32768, again=True, tokens=1672),
    _mpt("1B", _H, 8, 14, 1, tokens=45455),
    _mpt("3B", _H, 8, 10, 2),
    _mpt("30B", _H, 8, 3, 21, again=True, tokens=2002),
    _mpt("70B", _H, 32, 2, 16, again=True, tokens=882),
    _mpt("7B", _H, 8, 8, 2, sequence=8192, again=True, tokens=6935),
    _mpt("7B", _H, 8, 2, 2, sequence=32768, again=True, tokens=3318),
    _mpt("7B", _H, 8, 6, 1, fp8=True),
    _mpt("30B", _H, 8, 3, 21, again=True, fp8=True),
    _megatron("GPT-3 175B", _GPT3, _H, 128, 256, 4, 8, 12, 1, _NEMO, tokens=493),
    _megatron("Llama 3 70B", _LLAMA_70B, _H, 64, 128, 4, 8, 5, 1, _NEMO, fp8=True, tokens=1602),
    _megatron("Nemotron-3 8B", _NEMOTRON_8B, _H, 8, 32, 2, 1, 1, 2, _NEMO),
    _megatron("Nemotron-3 22B", _NEMOTRON_22B, _H, 64, 256, 2, 4, 10, 1, _NEMO),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _H, 64, 256, 2, 1, 1, 2, _NEMO, tokens=6136),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _H, 64, 256, 2, 1, 1, 2, _NEMO, fp8=True, tokens=8275),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _H, 256, 64, 8, 8, 12, 1, _NEMO, tokens=234.9),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _H, 256, 64, 8, 8, 12, 1, _NEMO, fp8=True, tokens=349.5),
    _megatron("Nemotron-4 15B, batch 1024", _NEMOTRON_15B, _H, 64, 1024, 4, 1, 1, 4, _NEMO, fp8=True),
    _megatron("Nemotron-4 15B, batch 1024", _NEMOTRON_15B, _H, 1024, 1024, 4, 1, 1, 4, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B, batch 512", _NEMOTRON_340B, _H, 128, 512, 8, 8, 12, 1, _NEMO, fp8=True),
    _megatron("Nemotron-4 340B, batch 512", _NEMOTRON_340B, _H, 1024, 512, 8, 8, 12, 1, _NEMO, fp8=True),
    _megatron("GPT-3 175B", _GPT3, _B, 128, 256, 4, 4, 12, 2, _NEMO),
    _megatron("GPT-3 175B", _GPT3, _B, 128, 256, 4, 4, 12, 2, _NEMO, fp8=True),
    _megatron("Llama 3 8B", _LLAMA_8B, _B, 8, 128, 1, 1, 1, 2, _NEMO),
    _megatron("Llama 3 8B", _LLAMA_8B, _B, 8, 128, 1, 1, 1, 2, _NEMO, fp8=True, tokens=30624),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _B, 64, 256, 1, 1, 1, 2, _NEMO),
    _megatron("Nemotron-4 15B", _NEMOTRON_15B, _B, 64, 256, 1, 1, 1, 2, _NEMO, fp8=True, tokens=14760),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _B, 128, 32, 8, 4, 12, 1, _NEMO),
    _megatron("Nemotron-4 340B", _NEMOTRON_340B, _B, 128, 32, 8, 4, 12, 1, _NEMO, fp8=True, tokens=602),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 16, 64, 2, 1, 1, 2, _DGXC, tokens=6159),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 128, 512, 2, 1, 1, 2, _DGXC, tokens=6136),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 1024, 4096, 2, 1, 1, 2, _DGXC, tokens=5980),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 2048, 8192, 2, 1, 1, 2, _DGXC, tokens=5894),
    _megatron("Nemotron-4 15B, weak", _NEMOTRON_15B, _H, 1024, 4096, 2, 1, 1, 2, _DGXC, fp8=True, tokens=8071),
    _megatron("Llama 3.1 8B", _LLAMA_8B, _M, 8, 128, 1, 1, 1, 2, _PRIMUS),
    _megatron("Llama 2 7B", _LLAMA2_7B, _M, 8, 256, 1, 1, 1, 4, _PRIMUS),
    _megatron("Qwen2.5 7B", _QWEN_7B, _M, 8, 640, 1, 1, 1, 10, _PRIMUS),
    _fsdp("Llama 3.1 70B", _LLAMA_70B, 8, 8, _PRIMUS),
    _fsdp("Llama 2 70B", _LLAMA2_70B, 8, 56, _PRIMUS),
)

# Read with their figures: nothing of this is blind. IBM's network is not told, and taken for the catalogue's.
_IBM, _NEMO_24, _TABLE = "fms-fsdp, README.md", "NeMo 24.12, performance summary", "llm-foundry, benchmarking/README.md"
_LLAMA2_13B = llama(5120, 40, 40, 40, 13824, vocabulary=32000, sequence=4096, name="s4096")
_CODE_34B = llama(8192, 48, 64, 8, 22016, vocabulary=32000, sequence=4096, name="s4096")


def _ibm(name: str, work: Workload, micro: int, within: int, tokens: float) -> Training:
    again = not within
    plan = Plan(shard="parameters", shard_degree=within, recompute=again, precision="bfloat16")
    return Training(name, work, _A, 128, 128 * micro, plan, _IBM, tokens=tokens)


def _small(size: str, workers: int, micro: int, tokens: float, **more: Any) -> Training:
    one = _mpt(size, _A, workers, micro, more.pop("parts", 1), tokens=tokens, **more)
    return dataclasses.replace(one, memory_nbytes=40 * 10**9, source=_TABLE, name=f"{one.name}, 40 GB")


_MLPERF = "training_results_v3.1, NVIDIA, Eos"
KNOWN = (
    _ibm("Llama 2 7B", _LLAMA2_7B, 2, 8, 3760),
    _ibm("Llama 2 13B", _LLAMA2_13B, 1, 8, 1700),
    _ibm("CodeLlama 34B", _CODE_34B, 8, 0, 772),
    _ibm("Llama 2 70B", _LLAMA2_70B, 6, 0, 380),
    _mpt("70B", _A, 32, 2, 16, again=True, tokens=373),
    _mpt("13B", _A, 8, 2, 3, tokens=2262),
    _mpt("3B", _H, 64, 6, 3, tokens=22525),
    _mpt("1B", _H, 64, 20, 1, tokens=44402),
    _mpt("13B", _H, 8, 2, 1, tokens=4792),
    _mpt("3B", _H, 8, 10, 6, fp8=True, tokens=30586),
    _small("70B", 128, 4, 376, again=True),
    _small("70B", 64, 2, 276, again=True),
    _small("30B", 128, 6, 865, again=True),
    _small("30B", 32, 4, 857, again=True),
    _small("13B", 128, 16, 1972, again=True),
    _small("13B", 16, 10, 1993, again=True),
    _small("7B", 128, 18, 3623, again=True),
    _small("3B", 128, 6, 9538),
    _small("3B", 8, 2, 8777, parts=8, sequence=4096),
    _megatron(
        "GPT-3 5B", _plain(4096, 24, 32, 2048, 51200), _H, 64, 2048, 1, 1, 1, 4, _NEMO_24, fp8=True, tokens=23406
    ),
    _megatron("GPT-3 20B", _plain(6144, 44, 48, 2048, 51200), _H, 64, 256, 2, 1, 1, 2, _NEMO_24, fp8=True, tokens=5851),
    _megatron("GPT-3 175B", _GPT3, _H, 512, 2048, 4, 8, 6, 2, _NEMO_24, fp8=True, tokens=825),
    _megatron("Llama 2 7B", _LLAMA2_7B, _H, 8, 128, 1, 1, 1, 1, _NEMO_24, fp8=True, tokens=16934),
    _megatron("Llama 2 70B", _LLAMA2_70B, _H, 64, 128, 4, 4, 20, 1, _NEMO_24, fp8=True, tokens=1728),
    _megatron("Nemotron-3 22B", _NEMOTRON_22B, _H, 64, 256, 2, 4, 10, 2, _NEMO_24, fp8=True, tokens=4312),
    _megatron("MLPerf GPT-3", _GPT3, _H, 10752, 2688, 4, 8, 6, 1, _MLPERF, fp8=True, tokens=5154997 / 10752),
)


def report(trainings: tuple[Training, ...]) -> str:
    """Return a table; trainings whose figure was not found are predicted without an error."""
    rows = []
    for one in trainings:
        said = predicted(one)
        tokens = said.throughput * one.sequence / one.workers
        times = said.interval_s[1] / said.step_s
        found = [""] * 3
        if one.tokens:
            right = 1 / times <= tokens / one.tokens <= times
            found = [f"{one.tokens:.0f}", f"{tokens / one.tokens - 1:+.0%}", "yes" if right else "no"]
        low, high = tokens / times, tokens * times
        rows.append([
            one.name, f"{one.workers} {one.on.removesuffix('-like')}", f"{one.batch}", said.plan.describe(),
            f"{tokens:.0f}", f"{low:.0f} to {high:.0f}", *found, f"{said.mfu:.0%}", f"{said.memory.total / 2**30:.0f}",
            one.source,
        ])  # fmt: skip
    head = ["training", "devices", "batch", "plan", "tokens/s a device", "80% within", "published", "error", "inside"]
    head += ["MFU", "GiB", "layout from"]
    return table(head, rows)


if __name__ == "__main__":
    print(report(BLIND), report(KNOWN), sep="\n\n")
