"""Steps of one device, predicted from the catalogue alone and measured: models captured on the meta device, one H100.

    python benchmarks/predictions/h100.py

Measured on 2026-11-26 by `benchmarks/gpu.py` on an H100 80GB HBM3 with PyTorch 2.13.0 (CUDA 13.0), without
torch.compile, AdamW; float32 with torch's own settings, with TF32 for matrix products, under autocast of float32
parameters to bfloat16, and all in bfloat16.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from plots import table

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import Case, cases, foreseen, in_mode
from hocket import cluster
from hocket.planner import Constants, Network, Plan, Prediction, Profile, predict
from hocket.workload import Workload

DERIVED = ("gpt2-124m", "vit-l", "resnet50")
"""Models whose kernels constants were taken from: of the last only when the model stood, and of others never."""


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        model: Its name in `benchmarks.gpu`.
        mode: Of products and parameters, likewise.
        measured_ms: Median of a step.
        before_ms: What was predicted before it was measured, with one rate for all formats.
        kinds: Milliseconds of kernels by their names: products and all of cuDNN's, attention, others.
    """

    model: str
    mode: str
    measured_ms: float
    before_ms: float
    kinds: tuple[float, float, float]


STEPS = (
    Step("gpt2-124m", "float32", 305.9, 45.2, (238.3, 36.2, 30.3)),
    Step("gpt2-124m", "tf32", 110.5, 45.2, (42.4, 36.7, 30.4)),
    Step("gpt2-124m", "autocast", 55.1, 39.4, (17.2, 3.7, 33.3)),
    Step("gpt2-124m", "bfloat16", 47.3, 38.6, (17.2, 3.7, 25.8)),
    Step("llama-1b", "float32", 1219.1, 134.5, (990.2, 121.3, 105.6)),
    Step("llama-1b", "tf32", 394.5, 134.5, (158.6, 125.0, 106.1)),
    Step("llama-1b", "autocast", 195.4, 123.8, (67.6, 10.8, 113.4)),
    Step("llama-1b", "bfloat16", 160.9, 116.3, (67.6, 10.9, 77.7)),
    Step("resnet50", "float32", 71.3, 51.0, (54.0, 0.0, 16.3)),
    Step("resnet50", "tf32", 71.3, 51.0, (54.0, 0.0, 16.3)),
    Step("resnet50", "autocast", 60.1, 27.5, (18.0, 0.0, 41.0)),
    Step("resnet50", "bfloat16", 59.1, 27.3, (18.0, 0.0, 40.2)),
    Step("vit-l", "float32", 539.1, 62.0, (438.5, 41.7, 54.0)),
)


@functools.cache
def network() -> Network:
    """The catalogue's H100."""
    return Network.of(cluster.load("h100-like"))


@functools.cache
def _cases() -> dict[str, Case]:
    return {one.name: one for one in cases(small=False)}


@functools.cache
def workload(model: str, mode: str) -> Workload:
    """As captured on the meta device."""
    with in_mode(mode):
        return foreseen(_cases()[model], mode)


@functools.cache
def predicted(model: str, mode: str) -> Prediction:
    """The step of one device."""
    batch = _cases()[model].batch
    return predict(Plan(), workload(model, mode), network(), workers=1, batch=batch)


def by_kind(model: str, mode: str) -> dict[str, float]:
    """Milliseconds of a step: products, attention, batch norm, strided, others, update."""
    profile = Profile(workload(model, mode), network(), Constants.of(network().reached))
    found = dict.fromkeys(("products", "attention", "batch norm", "strided", "others"), 0.0)
    for layer in profile.workload.layers:
        for one in layer.operations:
            kind = one.kind or ("attention" if "attention" in one.name else "products" if one.flops else "others")
            found[kind] += 1e3 * profile.kernel_s(one)
    return found | {"update": 1e3 * predicted(model, mode).parts.optimizer}


def report() -> str:
    """Both tables."""
    rows = []
    for one in STEPS:
        found = predicted(one.model, one.mode)
        low, high = (1e3 * end for end in found.interval_s)
        now_ms = 1e3 * found.step_s
        rows.append(
            [one.model + ("" if one.model in DERIVED else " *"), one.mode, f"{one.measured_ms:.1f}"]
            + [f"{one.before_ms:.1f}", f"{one.before_ms / one.measured_ms - 1:+.0%}", f"{now_ms:.1f}"]
            + [f"{low:.1f} to {high:.1f}", f"{now_ms / one.measured_ms - 1:+.1%}"]
            + ["yes" if low < one.measured_ms < high else "no", f"{found.mfu:.0%} of {found.mfu_format}"]
        )
    head = ["model", "mode", "measured ms", "before", "error", "now", "80% within", "error", "inside", "MFU"]
    kinds = []
    for one in STEPS:
        each = by_kind(one.model, one.mode)
        kinds.append([one.model, one.mode, *(f"{ms:.1f}" for ms in (*each.values(), *one.kinds))])
    names = ["products", "attention", "batch norm", "strided", "others", "update"]
    head_of_kinds = ["model", "mode", *names, *(f"measured: {name}" for name in ("products", "attention", "others"))]
    return f"{table(head, rows)}\n\n{table(head_of_kinds, kinds)}"


if __name__ == "__main__":
    print(report())
