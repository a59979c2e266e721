"""Scaling curves: throughput, efficiency and cost by workers, what another network would do, and where it ends."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.cluster import Cluster
from hocket.workload import Layer, Operation, Workload

from .._findings import PlanError, PlanFinding
from ..fits import ScalingFit
from ..network import MOST_RANKS, Constants, Network, network_of
from ..plan import Plan
from ..step import Prediction, in_precision, predict

_STREAMING = 0.95  # of the link, ISC'20 abstract (facts, algorithms 2.8)
WHAT_IFS: Mapping[str, str] = {
    "sharp": "switches reduce at 95% of the link",
    "bigraph": "a port of the same rate for every device, and no link that two flows share (EFLOPS)",
    "double-network": "twice the bandwidth between hosts",
    "fp16": "half the bytes of gradients, activations and memory traffic; products in bfloat16, where that is faster",
}
_ENOUGH = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """One number of workers.

    Attributes:
        workers: How many.
        throughput: Samples per second of all.
        efficiency: By that of one worker, times their number.
        parts: Seconds of a step by what takes them (of a fit: per sample of a worker).
        blame: The largest part that one worker does not have, with the link if it is one.
        fits: Whether the memory is enough.
        interval: Samples per second between which the throughput is with 80%; equal where nothing says.
        mfu: Model FLOPs by the device's peak, 0 where unknown.
        flops_per_worker: FLOP/s of the model that each worker makes, 0 where unknown.
        mfu_format: The number format of whose peak `mfu` is a part.
    """

    workers: int
    throughput: float
    efficiency: float
    parts: Mapping[str, float]
    blame: str
    fits: bool = True
    interval: tuple[float, float] = (0.0, 0.0)
    mfu: float = 0.0
    flops_per_worker: float = 0.0
    mfu_format: str = ""

    @property
    def worker_seconds(self) -> float:
        """Worker-seconds that 1,000 samples cost."""
        return 1000 * self.workers / self.throughput


@dataclass(frozen=True)
class Curve:
    """Points by workers.

    Attributes:
        name: "as it is", or a what-if's name.
        points: In ascending order.
    """

    name: str
    points: tuple[Point, ...]

    @property
    def stops(self) -> Point | None:
        """The point from which on more workers bring less than half of what they should; None if there is none."""
        for one, more in zip(self.points, self.points[1:], strict=False):
            gained = (more.throughput / one.throughput - 1) / (more.workers / one.workers - 1)
            if gained < _ENOUGH:
                return one
        return None

    def verdict(self) -> str:
        """Where it stops scaling and what is to blame."""
        last = self.points[-1]
        if not last.fits:
            enough = [one for one in self.points if one.fits]
            reach = f"up to {enough[-1].workers} workers it does" if enough else "with none of these numbers it does"
            return f"{self.name}: does not fit in the memory of {last.workers} workers; {reach}"
        if (end := self.stops) is not None:
            after = next(one for one in self.points if one.workers > end.workers)
            return f"{self.name}: stops scaling at {end.workers} workers, because of {after.blame}"
        if last.efficiency > 0.98:
            return f"{self.name}: scales up to {last.workers} workers ({last.efficiency:.0%})"
        reached = f"scales up to {last.workers} workers at {last.efficiency:.0%}"
        return f"{self.name}: {reached}; the most is lost to {last.blame}"


def scaling_curves(
    workload: Workload,
    cluster: Cluster | Network,
    workers: Sequence[int],
    *,
    batch_per_worker: int,
    plan: Plan | None = None,
    what_ifs: Sequence[str] = (),
    constants: Constants | None = None,
) -> list[Curve]:
    """Predict a workload on a cluster as it is, and on what it might be; batches grow with the workers.

    Args:
        workload: What is trained.
        cluster: Where.
        workers: Numbers of them, in any order.
        batch_per_worker: Samples of each.
        plan: For all; data parallelism if not given.
        what_ifs: Of `WHAT_IFS`, each for itself.
        constants: What is reached of nominal rates.

    Raises:
        PlanError: a what-if is unknown, or the plan cannot be timed.
    """
    network = network_of(cluster)
    if max(workers) > MOST_RANKS:  # points of one curve are alike in whether routes are looked at
        network = dataclasses.replace(network, routed=None)
    constants = constants or Constants.of(network.reached)
    workload = in_precision(plan or Plan(), workload)
    found = []
    for name in ("as it is", *what_ifs):
        case = _changed(name, workload, network, constants)
        points: list[Point] = []
        alone = _predicted(*case, 1, batch_per_worker, Plan()).throughput
        for count in sorted(set(workers)):
            one = _predicted(*case, count, batch_per_worker, plan or Plan())
            if name == "bigraph":  # of its links only the least are known, and it is no slower than what shares some
                same = _predicted(workload, network, constants, count, batch_per_worker, plan or Plan())
                one = min(one, same, key=lambda each: each.step_s)
            points.append(_point(one, alone))
        found.append(Curve(name, tuple(points)))
    return found


def _predicted(
    workload: Workload, network: Network, constants: Constants, count: int, each: int, plan: Plan
) -> Prediction:
    return predict(plan, workload, network, workers=count, batch=each * count, constants=constants)


def _point(one: Prediction, alone: float) -> Point:
    parts = {name: seconds for name, seconds in one.parts.rows() if seconds > 0}
    blame = one.parts.blame
    if blame in ("gradients", "gather") and one.gradient_cost.link:
        blame = f"{blame}: {one.gradient_cost.link} ({one.gradient_cost.algorithm})"
    efficiency = one.throughput / (one.workers * alone)
    known = one.fits, one.throughput_interval, one.mfu, one.flops_per_worker, one.mfu_format
    return Point(one.workers, one.throughput, efficiency, parts, blame, *known)


def _changed(
    name: str, workload: Workload, network: Network, constants: Constants
) -> tuple[Workload, Network, Constants]:
    if name == "as it is":
        return workload, network, constants
    if name == "sharp":
        reducing = dataclasses.replace(constants, in_network=True)
        return workload, dataclasses.replace(network, reduces=_STREAMING), reducing
    if name == "double-network":
        return workload, _doubled(network), constants
    if name == "bigraph":
        return workload, dataclasses.replace(network, host_Bps=network.local * network.rank_Bps, routed=None), constants
    if name == "fp16":
        return _halved(workload, network), network, constants
    raise _unknown(name)


def _unknown(what_if: str) -> PlanError:
    finding = PlanFinding("what-if", f"there is no what-if {what_if!r}", f"there are {', '.join(WHAT_IFS)}")
    return PlanError("nothing to predict:", [finding])


def _doubled(network: Network) -> Network:
    """Return the wires with twice the bandwidth between hosts; on the routes, too, where those say what is reached."""
    cluster = network.routed
    if cluster is None or network.reached:
        return dataclasses.replace(network, host_Bps=2 * network.host_Bps, rank_Bps=2 * network.rank_Bps)
    here, there = cluster.hosts[cluster.link_tail], cluster.hosts[cluster.link_head]
    times = np.where((here < 0) | (here != there), 2.0, 1.0)
    return Network.of(dataclasses.replace(cluster, capacity_Bps=times * cluster.capacity_Bps))


def _halved(workload: Workload, network: Network) -> Workload:
    """In 16 bits, with the parameters in full precision beside. Raises PlanError: it is not in 32 bits."""
    if workload.precision != "float32":
        rule = f"{workload.name} is in {workload.precision}, and fp16 asks what half of 32 bits would do"
        raise PlanError("nothing to predict:", [PlanFinding("what-if", rule, "leave fp16 out")])
    faster = network.peak("bfloat16")[0] > network.peak("float32")[0]
    layers, finer = _halved_layers(workload.layers, faster), _halved_layers(workload.finer, faster)
    values = workload.update_values  # they are in full precision still, as is what is updated
    values = 2 * values if values is not None else None
    return dataclasses.replace(workload, layers=layers, finer=finer, precision="bfloat16", update_values=values)


_PASSING = ("peak_bytes", "peak_fixed_bytes")


def _halved_layers(whole: Sequence[Layer], faster: bool) -> tuple[Layer, ...]:
    def halved(one: Any, *names: str) -> dict[str, Any]:
        """Return what halves of a layer or a share of one; its optimizer has the parameters in full precision, too."""
        state = {"optimizer_bytes": one.optimizer_bytes + one.parameter_bytes}
        names = ("parameter_bytes", "gradient_bytes", *names, *_PASSING)
        return _half_of(one, *names) | state | {"operations": _halves(one.operations, faster)}

    layers = []
    for layer in whole:
        shares = tuple(
            dataclasses.replace(
                share,
                **halved(share),
                exchanges=tuple(dataclasses.replace(one, nbytes=one.nbytes / 2) for one in share.exchanges),
            )
            for share in layer.shares
        )
        layers.append(dataclasses.replace(layer, **halved(layer, "output_bytes", "reduced_bytes"), shares=shares))
    return tuple(layers)


def _half_of(one: Any, *names: str) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in names}
    return {name: value // 2 if isinstance(value, int) else value / 2 for name, value in values.items()}


def _halves(operations: tuple[Operation, ...], faster: bool) -> tuple[Operation, ...]:
    """Return the operations in 16 bits; what is put into another order for matrix units is so where they are faster."""
    changed = ("float32", "tf32", "3xtf32")
    names = ("moved_bytes", "saved_bytes", "weight_bytes", "fixed_bytes", "saved_fixed_bytes")
    return tuple(
        dataclasses.replace(
            one,
            **_half_of(one, *names),
            number_format="bfloat16" if one.number_format in changed and (one.flops or faster) else one.number_format,
            performed_flops=0.0,
        )
        for one in operations
    )


def curve_of_fit(name: str, fit: ScalingFit, network: Network, workers: Sequence[int], what_if: str = "") -> Curve:
    """Return the curve of a fit; a what-if changes the constants that it is about.

    Args:
        name: Of the column.
        fit: Its constants.
        network: Where it was measured.
        workers: Numbers of them.
        what_if: One of `WHAT_IFS`, or "".

    Raises:
        PlanError: there is no such what-if.
    """
    ports = network.host_Bps / network.rank_Bps if network.rank_Bps else 1.0
    changes: dict[str, Callable[[ScalingFit], ScalingFit]] = {
        "": lambda one: one,
        "double-network": lambda one: dataclasses.replace(one, between_s=one.between_s / 2),
        "bigraph": lambda one: dataclasses.replace(one, between_s=one.between_s * min(1.0, ports / one.local)),
        "fp16": lambda one: dataclasses.replace(one, between_s=one.between_s / 2, inside_s=one.inside_s / 2),
        # An all-reduce between hosts passes 2 (k - 1)/k S, a tree S; of many hosts that is half.
        "sharp": lambda one: dataclasses.replace(one, between_s=one.between_s / 2 / _STREAMING),
    }
    if what_if not in changes:
        raise _unknown(what_if)
    changed = changes[what_if](fit)
    points = []
    for count in sorted(set(workers)):
        parts = changed.parts(count)
        blame = max((part for part in parts if part != "compute"), key=lambda part: parts[part])
        rate, share = changed.throughput(count), changed.efficiency(count)
        points.append(Point(count, rate, share, parts, blame, interval=changed.interval(count)))
    return Curve(f"{name}, {what_if}" if what_if else name, tuple(points))
