"""The physical constants of the time model: what they mean, and values that were fitted once.

The defaults are those of DGX A100 servers: `matmul_share` and `memory_share` fitted on four published iterations
(`benchmarks/predictions/language_models.py`; 1.7B and 18.4B of Narayanan et al., SC'21, and both 22B of Korthikanti et
al. 2022), `inside_share` from nccl-tests on 8 A100 (235 of 300 GB/s), `network_share` from the vendor's 192 GB/s of
busbw over eight NICs, which is all that the catalogue's buses carry. `float32_share`, `attention32_share`,
`strided_share`, `batch_norm_share` and `launch_s` were seen on one H100 (80GB HBM3, PyTorch 2.13, 2026-11-26;
docs/predictions.md): the first three on GPT-2 and ViT-L, `batch_norm_share` on ResNet-50, `launch_s` on additions of 16
numbers. `host_s`, `update_host_s` and `depthwise_share` are from one H200 the same night, the first two from a model of
small layers, the last from ConvNeXt and MobileNetV2. `recurrent_share` is from eight published times of cuDNN's
layers on GPUs of 2015 to 2017 (`tests/planner/test_recurrent.py`). The others are assumed.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hocket.units import parse_time

from .._findings import PlanError

Basis = Literal["assumed", "fitted", "measured"]


@dataclass(frozen=True)
class Constants:
    """What a machine reaches of its nominal rates, and what every operation costs besides. Each can be fitted.

    Attributes:
        matmul_share: Of the device's nominal FLOP/s, what large products reach.
        memory_share: Of the device's nominal memory bandwidth, what kernels that only read and write reach.
        float32_share: Of a device's rate in float32 without matrix units (`float32_flops`), what large products reach.
        attention32_share: Of a third of its rate in TF32, what memory-efficient attention in float32 reaches.
        strided_share: Of its memory bandwidth, what kernels reach that go through tensors whose numbers lie in
            different orders (`Operation.kind`).
        batch_norm_share: The same of batch norm in 16 bits where channels are not last: a block of threads for each
            channel reads numbers one by one.
        depthwise_share: The same of convolutions with one window for each channel, whose threads read four bytes for
            each product, though from caches.
        recurrent_share: The same of the steps of recurrent layers, whose small products read their weights every time.
        fused_share: Of the memory traffic of kernels that only read and write, and of their launches, the part that
            fusion takes away (torch.compile). Kernels that a workload counts as one are fused already. Assumed.
        kernel_s: What launching a kernel adds to its time.
        host_s: What the host takes for each of PyTorch's operators in a training step: modules, autograd, memory and a
            launch. The device waits where kernels are shorter. Of captured models whose operators are counted; compiled
            ones launch fewer.
        launch_s: What the host takes for each further launch inside of an operator.
        update_host_s: What the host takes for each tensor that the optimizer updates.
        inside_share: Of the links inside a host, what a collective reaches.
        network_share: Of the links between hosts, what a collective reaches.
        gather_share: Of what an all-reduce reaches of the links, what reduce-scatters and all-gathers of sharded values
            do, whose layouts are copied on the way.
        fetch_share: Of that, what the gathers and reduce-scatters of sharded parameters do, block by block.
        prefetch: Whether a block's parameters are fetched, and its gradients reduced, while another is computed.
        message_share: Of the links, what messages between the stages of a pipeline reach.
        collective_s: What starting a collective costs, besides the latencies of its steps.
        jitter: Standard deviation of the time that one rank's computation of a step takes, as a part of it. All wait
            for the slowest, whose expected time grows with their number.
        host_jitter: The same of all ranks of a host together: a hot host, another job's traffic, its file system.
        congestion: By which part what crosses between hosts takes longer for every doubling of the hosts: flows whose
            hashed paths meet, and a network that is tapered towards its top.
        interference: Of the time that collectives run beside computation, what they take from it: their kernels need
            multiprocessors and memory bandwidth.
        step_s: What every step costs besides: its loop, the loss of all ranks, the first and the last collective.
        pass_s: What each part of a batch costs besides its computation where there is no pipeline: its gradients'
            hooks, its loss.
        stage_s: What a stage of a pipeline costs for each micro-batch besides its computation and its messages.
        optimizer_shard_s: What a step costs besides where two ranks share the optimizer's state; more wait longer,
        gradient_shard_s: and where gradients are sharded as well, which are reduced for each further part of a batch.
        block_s: What a block with sharded parameters costs for each pass besides what is fetched, of two ranks; more
            wait longer for each other (`waiting`),
        block_wait_s: what it costs besides where ranks compute it, forward and back, for
        block_computed_s: or longer; where for less, a part of that,
        tensor_s: and each of its tensors.
        divided_times: How many times as long ranks compute that share layers as their part of the work would
            have them: less than 1 where a part of the weights stays in a cache and the whole does not, more where
            kernels are worse with small matrices. Known from runs only (`fitted`).
        exchange_s: What an exchange of two ranks that share tensors costs besides its collective; more wait longer.
        exchange_share: Of what collectives reach of the links, what those exchanges do, while all compute.
        overlap: Whether gradients are reduced while back-propagation goes on (else after it). In a pipeline only those
            of sharded parameters are: the Trainer reduces others when all passes of a rank are over.
        in_network: Whether switches that can reduce are made to do so.
        basis: Where these constants are from: they were "assumed", "fitted" on runs elsewhere, or "measured" here.
        fitted_workers: The most workers of the runs that they were fitted on; 0 if on none.
        swept: How many ranks took part in the sweep to which what collectives reach was fitted (`fit_sweep`); 0 if
            there was none.
        unmodelled: Standard deviation of what no formula knows, as a part of a step, told by the runs that they were
            fitted on; 0 if on none.
        seen: Of each plan that they were fitted on, its place among plans and the weight with which what it was off by
            counts for plans like it (`_likeness.py`).
    """

    matmul_share: float = 0.72
    memory_share: float = 0.79
    float32_share: float = 0.77
    attention32_share: float = 0.2
    strided_share: float = 0.35
    batch_norm_share: float = 0.22
    depthwise_share: float = 0.9
    recurrent_share: float = 0.5
    fused_share: float = 0.0
    kernel_s: float = 4e-6
    host_s: float = 30e-6
    launch_s: float = 9.7e-6
    update_host_s: float = 17e-6
    inside_share: float = 0.78
    network_share: float = 1.0
    gather_share: float = 1.0
    fetch_share: float = 1.0
    prefetch: bool = True
    message_share: float = 1.0
    collective_s: float = 10e-6
    jitter: float = 0.0
    host_jitter: float = 0.0
    congestion: float = 0.0
    interference: float = 0.0
    step_s: float = 0.0
    pass_s: float = 0.0
    stage_s: float = 0.0
    optimizer_shard_s: float = 0.0
    gradient_shard_s: float = 0.0
    block_s: float = 0.0
    block_wait_s: float = 0.0
    block_computed_s: float = 0.0
    tensor_s: float = 0.0
    divided_times: float = 1.0
    exchange_s: float = 0.0
    exchange_share: float = 1.0
    overlap: bool = True
    in_network: bool = False
    basis: Basis = "assumed"
    fitted_workers: int = 0
    swept: int = 0
    unmodelled: float = 0.0
    seen: tuple[tuple[tuple[float, ...], float], ...] = ()

    @classmethod
    def of(cls, reached: Mapping[str, Any]) -> "Constants":
        """Return what trainings reach: what a cluster says of itself, and else what is usual.

        Args:
            reached: Of `Network.reached`.

        Raises:
            PlanError: there is no such constant, or no such value of it.
        """
        known = {one.name: type(getattr(USUAL, one.name)) for one in dataclasses.fields(cls)}
        del known["seen"]  # of runs, which no cluster has
        changed: dict[str, Any] = {}
        for name, value in reached.items():
            if (kind := known.get(name)) is None:
                raise PlanError(f"{name} = {value!r} is no constant; there are {', '.join(known)}")
            try:  # a spec on the command line has words only
                changed[name] = kind(value) if kind in (int, float) and not isinstance(value, bool) else value
            except ValueError:
                changed[name] = _time(value) if name.endswith("_s") else None
            if not isinstance(changed[name], kind):
                rule = f"it is {_KINDS[kind]}{' or a time, as 4us' if name.endswith('_s') else ''}"
                raise PlanError(f"constant {name}: {value!r} is no value of it; {rule}")
        return dataclasses.replace(USUAL, **changed)

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise PlanError(f"constant {one.name}: {value} is no number that can be reached; give a finite one")
            if one.name == "fused_share":
                if not 0 <= value < 1:
                    raise PlanError(f"constant {one.name}: {value} is no such part; give 0 or more, and less than 1")
            elif one.name.endswith("_share") and not 1e-6 <= value <= 1:
                raise PlanError(f"constant {one.name}: {value} is no share; give at least 1e-6 and at most 1")
            if (one.name.endswith("_s") or one.name in _AT_LEAST_0) and value < 0:
                raise PlanError(f"constant {one.name}: {value} must be 0 or more")
            if one.name in _AT_MOST_1 and value > 1:
                unit = "seconds" if one.name.endswith("_s") else "a part of the whole, 0.01 for 1%"
                raise PlanError(
                    f"constant {one.name}: {value:g} is more than any machine's; it is {unit}; give at most 1"
                )
            if one.name.endswith("_s") and value > _MOST_S:
                raise PlanError(f"constant {one.name}: {value:g} s is no overhead; give at most {_MOST_S:g}")
            if one.name == "divided_times" and not 1e-6 <= value <= 1e6:
                raise PlanError(f"constant {one.name}: {value:g} must be 1e-6 to 1e6")
        if self.basis not in get_args(Basis):
            raise PlanError(f"constant basis: {self.basis!r} is none of {', '.join(get_args(Basis))}")

    def product_share(self, number_format: str, told_apart: bool = True) -> tuple[float, str]:
        """Return what products in a format reach of its peak, and the constant that says so.

        Args:
            number_format: In which they run (`Network.peak`).
            told_apart: Whether the device has a rate in float32 of its own.
        """
        own = {"3xtf32": "attention32_share", "float32": "float32_share"} if told_apart else {}
        name = own.get(number_format, "matmul_share")
        return getattr(self, name), name

    def table(self) -> list[tuple[str, str]]:
        """Every constant with its value."""
        rows = []
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name.endswith("_s"):
                rows.append((one.name, f"{value * 1e6:.3g} us"))
            elif isinstance(value, bool):
                rows.append((one.name, "yes" if value else "no"))
            elif one.name == "divided_times":
                rows.append((one.name, f"{value:.3g}"))
            elif isinstance(value, tuple):
                rows.append((one.name, f"{len(value)} plans"))
            elif isinstance(value, str | int):
                rows.append((one.name, str(value)))
            else:
                rows.append((one.name, f"{value:.1%}"))
        return rows


def _time(text: str) -> float | None:
    try:
        return parse_time(text)
    except ValueError:
        return None


_AT_LEAST_0 = ("jitter", "host_jitter", "congestion", "interference", "fitted_workers", "swept", "unmodelled")
_MOST_S = 1e6  # of what anything costs besides: far more than there is, and no number that arithmetic fails at
_AT_MOST_1 = ("jitter", "host_jitter", "congestion", "interference", "unmodelled", "kernel_s", "collective_s")
_KINDS: Mapping[type, str] = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}

USUAL = Constants(network_share=0.8, fetch_share=0.8, jitter=0.01, host_jitter=0.01, congestion=0.02, interference=0.1)
"""What is taken of a cluster that says nothing of what is reached: assumed, in the middle of what is published.

Between hosts 0.8 (320 of 400 GB/s, H100, nccl #1221; 0.9 and more are reached with adaptive routing), 1% of jitter
(EDSR's best curve has 0.8%, its worst 11%), a tenth of a collective's time (16 of 132 multiprocessors).
"""


def slowest_of(count: int) -> float:
    """Return the expected greatest of `count` standard normal values (Blom 1958); 0 for one.

    It says by how many standard deviations the slowest of `count` ranks is behind the mean one.
    """
    if count <= 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def waiting(ranks: float) -> float:
    """By how much longer so many ranks that go in step wait for each other than two do.

    Each waits for processors by itself and then for all others, whose messages pass in log2 rounds.
    """
    return (1 + math.log2(max(1, ranks))) / 2
