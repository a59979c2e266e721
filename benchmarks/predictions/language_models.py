"""Published iterations of large language models against the planner's time model, with one set of constants.

python benchmarks/predictions/language_models.py          the tables of docs/predictions.md
python benchmarks/predictions/language_models.py fit      the fit of the two constants
"""

import dataclasses
import functools
import sys
from collections.abc import Container
from dataclasses import dataclass

from plots import table

from hocket import cluster
from hocket.planner import Constants, Network, Plan, Prediction, memory_of, predict
from hocket.workload import SHAPES, Workload, transformer

# Nothing is overlapped in the runs below: Megatron-LM of 2021 reduces gradients after the last backward pass.
CONSTANTS = Constants(overlap=False, basis="fitted", fitted_workers=256)


@dataclass(frozen=True)
class Row:
    """A published run; `seconds` is 0 where it is only predicted here."""

    shape: str
    tensor: int
    pipeline: int
    workers: int
    batch: int
    seconds: float = 0.0


# Narayanan et al., SC'21, table 1 (facts, section 8); seconds are computed from its TFLOP/s. The size of micro-batches
# and interleaving are not in the table: as its authors did, the best is taken, here by the model, within 80 GB.
MEGATRON = (
    Row("1.7b", 1, 1, 32, 512, 3.53),
    Row("3.6b", 2, 1, 64, 512, 3.70),
    Row("7.5b", 4, 1, 128, 512, 3.70),
    Row("18.4b", 8, 1, 256, 1024, 9.40),
    Row("39.1b", 8, 2, 512, 1536, 14.45),
    Row("76.1b", 8, 4, 1024, 1792, 16.06),
    Row("145.6b", 8, 8, 1536, 2304, 24.82),
    Row("310.1b", 8, 16, 1920, 2160),
    Row("529.6b", 8, 35, 2520, 2520),
    Row("1008b", 8, 64, 3072, 3072),
)


@dataclass(frozen=True)
class Recomputed:
    """A run of Korthikanti et al. with full recomputation, and with sequence parallelism and the selective one."""

    shape: str
    pipeline: int
    stages_per_rank: int
    batch: int
    micro_batch: int
    full_s: float = 0.0
    selective_s: float = 0.0


# Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5 (facts, section 8); tensor 8, data 1.
KORTHIKANTI = (
    Recomputed("22b", 1, 1, 4, 4, 1.42, 1.10),
    Recomputed("175b", 8, 3, 64, 1, 18.13, 13.75),
    Recomputed("529.6b", 35, 3, 280, 1),
    Recomputed("1008b", 64, 1, 512, 1),
)
# The same, figures 1 and 7: 22B, batch 4, tensor 8; layers of the transformer only.
STATE_GIB, ACTIVATIONS_GIB = 45.5625, {"none": 59.25, "sequence and selective": 9.5625}
ACTIVATION_PERCENT = {
    "none": 100.0,
    "sequence": 66.84,
    "selective": 49.42,
    "sequence and selective": 16.18,
    "full": 7.64,
}
HOW = {
    "none": {},
    "sequence": {"sequence_parallel": True},
    "selective": {"recompute": True, "recompute_part": "attention"},
    "sequence and selective": {"sequence_parallel": True, "recompute": True, "recompute_part": "attention"},
    "full": {"recompute": True},
}
LIMIT = 80e9


@dataclass(frozen=True)
class Compared:
    """SC'21, table 2, 174.6B: TFLOP/s a device, with what is computed again."""

    how: str
    workers: int
    micro_batch: int
    tflops: float = 0.0
    fitted: bool = False


# ZeRO-3 (DeepSpeed) without model parallelism, and PTD-P with tensor 8 and pipeline 12; batch 1536. The rows that are
# not in the facts are from memory (88 and 44; 141): none of these predictions is blind. The first fits what gathers of
# that program reached of the links between hosts; FSDP reaches ten times as much of such links (blind.py).
ZERO_SHARE = 0.081
TABLE_2 = (
    Compared("ZeRO-3", 384, 4, 144, fitted=True),
    Compared("ZeRO-3", 768, 2, 88),
    Compared("ZeRO-3", 1536, 1, 44),
    Compared("PTD-P", 384, 1, 153),
    Compared("PTD-P", 768, 1, 149),
    Compared("PTD-P", 1536, 1, 141),
)


@functools.cache
def network() -> Network:
    """Selene, or like it."""
    return Network.of(cluster.load("selene-like"))


@functools.cache
def shape(name: str, gradient_nbytes: int) -> Workload:
    """One of the papers' models; SC'21's runs reduce gradients of 16 bits, the later ones keep them in 32."""
    hidden, layers, heads = SHAPES[name]
    return transformer(hidden, layers, heads, name=name, gradient_nbytes=gradient_nbytes)


def megatron(row: Row, constants: Constants, where: Network) -> tuple[Prediction, int]:
    """The best micro-batch and interleaving of a layout, by the model; with the micro-batch."""
    workload = shape(row.shape, 2)
    each = row.batch * row.tensor * row.pipeline // row.workers
    found = []
    for micro in (1, 2, 4, 8, 16):
        count = each // micro
        if each % micro:
            continue
        for stages in (1, 2, 3, 4):
            piped = row.pipeline > 1
            if stages > 1 and (not piped or count % row.pipeline or SHAPES[row.shape][1] % (row.pipeline * stages)):
                continue
            plan = Plan(
                tensor_parallel_degree=row.tensor,
                pipeline_parallel_degree=row.pipeline,
                micro_batches=count if piped else 1,
                accumulate=1 if piped else count,
                recompute=True,
                stages_per_rank=stages,
                pipeline_schedule="interleaved" if stages > 1 else "1f1b",
            )
            one = predict(plan, workload, where, workers=row.workers, batch=row.batch, constants=constants)
            if one.memory.total <= LIMIT:
                found.append((one, micro))
    return min(found, key=lambda pair: pair[0].step_s)


def recomputed(row: Recomputed, selective: bool, constants: Constants, where: Network) -> Prediction:
    """One column of table 5."""
    count = row.batch // row.micro_batch
    plan = Plan(
        tensor_parallel_degree=8,
        pipeline_parallel_degree=row.pipeline,
        micro_batches=count,
        stages_per_rank=row.stages_per_rank,
        pipeline_schedule="interleaved" if row.stages_per_rank > 1 else "1f1b",
        recompute=True,
        recompute_part="attention" if selective else "layers",
        sequence_parallel=selective,
    )
    workload = shape(row.shape, 4)
    return predict(plan, workload, where, workers=8 * row.pipeline, batch=row.batch, constants=constants)


def compared(row: Compared) -> Prediction:
    """A row of table 2, with what the catalogue says is reached on selene-like, but for ZeRO-3's gathers."""
    if row.how == "ZeRO-3":
        plan = Plan(shard="parameters", recompute=True)
        constants = Constants.of({**network().reached, "fetch_share": ZERO_SHARE})
    else:
        count = 1536 * 96 // row.workers
        stages = {"stages_per_rank": 2, "pipeline_schedule": "interleaved"} if count % 12 == 0 else {}
        plan = Plan(
            tensor_parallel_degree=8, pipeline_parallel_degree=12, micro_batches=count, recompute=True, **stages
        )  # fmt: skip
        constants = dataclasses.replace(Constants.of(network().reached), overlap=False)
    return predict(plan, shape("175b", 2), network(), workers=row.workers, batch=1536, constants=constants)


def tflops(one: Prediction) -> float:
    """As the paper counts: with the forward pass that is computed again."""
    return one.flops_per_worker * 4 / 3 / 1e12


def errors(constants: Constants, only: Container[str] | None = None) -> dict[str, float]:
    """Of every published iteration, or only of those named, the error of the prediction, as a part of it."""
    where = network()
    found = {}
    for row in MEGATRON:
        if row.seconds and (only is None or row.shape in only):
            found[row.shape] = megatron(row, constants, where)[0].step_s / row.seconds - 1
    for one in KORTHIKANTI:
        for how, selective, seconds in (("full", False, one.full_s), ("selective", True, one.selective_s)):
            name = f"{one.shape} {how}"
            if one.full_s and (only is None or name in only):
                found[name] = recomputed(one, selective, constants, where).step_s / seconds - 1
    return found


CALIBRATION = ("1.7b", "18.4b", "22b full", "22b selective")


def fit() -> Constants:
    """Least squares of the relative error in two shares, on four iterations."""
    from scipy.optimize import least_squares

    def residuals(shares: list[float]) -> list[float]:
        constants = dataclasses.replace(CONSTANTS, matmul_share=shares[0], memory_share=shares[1])
        found = errors(constants, CALIBRATION)
        return [found[name] for name in CALIBRATION]

    best = least_squares(residuals, [0.7, 0.7], bounds=([0.3, 0.3], [1.0, 1.0]), diff_step=1e-3).x
    return dataclasses.replace(CONSTANTS, matmul_share=float(best[0]), memory_share=float(best[1]))


def activations() -> dict[str, float]:
    """GiB of activations of the 22B model's transformer layers, by what is computed again and divided."""
    whole = shape("22b", 4)
    blocks = dataclasses.replace(whole, layers=tuple(one for one in whole.layers if one.kind == "transformer"))
    plans = {name: Plan(tensor_parallel_degree=8, **how).resolve(8) for name, how in HOW.items()}
    return {name: memory_of(plan, blocks, batch=4).activations / 2**30 for name, plan in plans.items()}


def state_gib() -> float:
    """GiB of parameters, gradients and optimizer state of the same."""
    whole = shape("22b", 4)
    blocks = dataclasses.replace(whole, layers=tuple(one for one in whole.layers if one.kind == "transformer"))
    return memory_of(Plan(tensor_parallel_degree=8).resolve(8), blocks, batch=4).state / 2**30


def _parts(one: Prediction) -> list[str]:
    return [f"{getattr(one.parts, name):.2f}" for name in ("compute", "recompute", "tensor", "bubble", "gradients")]


def report() -> str:
    """All tables."""
    where = network()
    rows = []
    for row in MEGATRON:
        one, micro = megatron(row, CONSTANTS, where)
        said = [f"{row.seconds:.2f}", f"{one.step_s / row.seconds - 1:+.1%}"] if row.seconds else ["", "predicted"]
        layout = f"{row.tensor} x {row.pipeline} x {row.workers // (row.tensor * row.pipeline)}"
        inner = f"{micro}, {one.plan.stages_per_rank}"
        memory = f"{one.memory.total / 1e9:.0f}"
        rows.append([row.shape, layout, inner, *said, f"{one.step_s:.2f}", *_parts(one), memory])
    head = ["model", "tensor x pipeline x data", "micro-batch, stages", "published s", "error", "predicted s"]
    parts = ["compute", "recompute", "tensor", "bubble", "gradients"]
    text = table([*head, *parts, "GB"], rows)
    rows = []
    for row in KORTHIKANTI:
        for selective, published in ((False, row.full_s), (True, row.selective_s)):
            one = recomputed(row, selective, CONSTANTS, where)
            said = [f"{published:.2f}", f"{one.step_s / published - 1:+.1%}"] if published else ["", "predicted"]
            how = "sequence and selective" if selective else "full"
            rows.append([row.shape, how, *said, f"{one.step_s:.2f}", *_parts(one)])
    text += "\n\n" + table(["model", "recomputation", "published s", "error", "predicted s", *parts], rows)
    rows = []
    for each in TABLE_2:
        one = compared(each)
        low, high = (tflops(one) * rate / one.throughput for rate in one.throughput_interval)
        error = "fitted" if each.fitted else f"{tflops(one) / each.tflops - 1:+.1%}"
        inside = "" if each.fitted else "yes" if low <= each.tflops <= high else "no"
        within = f"{low:.0f} to {high:.0f}"
        rows.append([each.how, str(each.workers), f"{each.tflops:.0f}", f"{tflops(one):.0f}", within, error, inside])
    head = ["174.6B", "devices", "published TFLOP/s", "predicted", "80% within", "error", "inside"]
    text += "\n\n" + table(head, rows)
    found = activations()
    rows = [
        [name, f"{found[name]:.2f}", f"{found[name] / found['none']:.2%}", f"{percent:.2f}%"]
        for name, percent in ACTIVATION_PERCENT.items()
    ]
    text += "\n\n" + table(["22B, activations", "GiB", "of the first", "published"], rows)
    return text + f"\n\nParameters, gradients, optimizer: {state_gib():.2f} GiB; published {STATE_GIB} GiB."


if __name__ == "__main__":
    print("\n".join(f"{name}: {value}" for name, value in fit().table()) if "fit" in sys.argv else report())
