"""Metrics and losses over all ranks' samples: which are sums over samples, and the sums of what each rank adds."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.batches import BatchShard, views_like
from hocket.parallel.mesh import World

from . import _private

_WHOLE_BATCH = frozenset({keras.losses.dice, keras.losses.tversky, keras.losses.circle})
"""Functions of Keras' that return one number for the batch."""

_MEANS = frozenset({"sum_over_batch_size", "mean"})


def is_mean_over_samples(loss: Any) -> bool:
    """Return whether a Keras loss (its reduction included) is the mean of terms of one sample each.

    A function of the user's may look at the batch as a whole, and a mean by the sum of the samples' weights has a
    denominator that one rank does not know, as has one that leaves a class out. A loss class of one's own says that it
    is such a mean by an attribute `additive = True`.
    """
    if getattr(loss, "reduction", None) not in _MEANS:
        return False
    if getattr(loss, "additive", False):
        return True
    if _options(loss).get("ignore_class") is not None:
        return False
    return _is_kerases(loss) and _is_kerases_function(getattr(loss, "fn", None)) and not _along_samples(loss)


def is_sum_over_samples(metric: Any) -> bool:
    """Return whether what a metric keeps, from zero, is the sum of what each sample adds to it.

    That is so for all metrics of Keras itself (totals, counts, confusion matrices), but not for those around a function
    of the user's, which may return one number for the batch. A metric class of one's own says so by an attribute
    `additive = True`.
    """
    if getattr(metric, "additive", False):
        return True
    return _is_kerases(metric) and _is_kerases_function(getattr(metric, "_fn", None)) and not _along_samples(metric)


def _along_samples(wrapper: Any) -> bool:
    """Whether a loss or metric is around a function that works along the axis of the samples, or along all."""
    given = _options(wrapper)
    if "axis" not in given:
        return False
    axis = given["axis"]
    return axis is None or 0 in (axis if isinstance(axis, tuple | list) else (axis,))


def _options(wrapper: Any) -> dict[str, Any]:
    """Return what the function in a loss or metric is called with besides."""
    return getattr(wrapper, "_fn_kwargs", None) or {}


def _is_kerases(value: Any) -> bool:
    return type(value).__module__.startswith("keras.src.")


def _is_kerases_function(function: Any) -> bool:
    if function is None:
        return True
    return str(getattr(function, "__module__", "")).startswith("keras.src.") and function not in _WHOLE_BATCH


def compiled_metrics(model: Any) -> list[Any]:
    """Return the metrics that were given to `compile`, each by itself."""
    return [m for metric in model.metrics if isinstance(metric, _private.CompileMetrics) for m in metric.metrics]


def other_metrics(model: Any) -> list[Any]:
    """Return the trackers of losses, and the metrics that the model or a layer of it keeps by itself."""
    return [metric for metric in model.metrics if not isinstance(metric, _private.CompileMetrics)]


@contextmanager
def by_samples(metric: Any, share: Callable[[], BatchShard | None]) -> Iterator[None]:
    """Open a block in which a mean of numbers, one for each batch, takes a rank's number as that of its samples.

    Keras itself gives numbers of the whole batch, if every rank has put it together, the weight of all samples.
    """
    if type(metric) is not keras.metrics.Mean:
        yield
        return
    plain = metric.update_state
    around = {name: value for name, value in vars(metric).items() if name == "update_state"}  # of a block around this

    def update_state(values: Any, sample_weight: Any = None) -> None:
        part = share()
        if part is not None and not getattr(values, "shape", ()):
            if sample_weight is None:
                sample_weight = part.samples / part.total
            elif isinstance(sample_weight, int) and sample_weight == part.total:
                sample_weight = part.samples
        plain(values, sample_weight=sample_weight)

    metric.__dict__["update_state"] = update_state
    try:
        yield
    finally:
        del metric.__dict__["update_state"]
        metric.__dict__ |= around


class MetricSums:
    """The states of metrics that are sums over samples.

    In a step they begin from zero, so that what they hold after it is this rank's contribution; then all ranks'
    contributions are added, in float64, to what they were before. On the way one number tells whether the ranks' random
    generators are still equal; where they are not (a torch layer drew numbers for its share), all take rank 0's.
    """

    def __init__(self, variables: list[Any], world: World) -> None:
        self.variables = variables  # of the metrics
        self._world = world
        self._local: dict[str, list[torch.Tensor]] = {}  # sums of this rank alone, in training and in evaluation

    def step(
        self, work: Callable[[], dict[str, Any]], share: BatchShard, results: Callable[[], dict[str, Any]], phase: str
    ) -> dict[str, Any]:
        """Run `work` and add up over ranks what it adds to the metrics; a collective operation.

        `results` gives those of the metrics, by name. `phase` is "train" or "test".

        Returns:
            The logs that `work` has given, over all ranks: what metrics say, and means over samples of the others.
        """
        states = [variable.value.detach() for variable in self.variables]
        before = [state.clone() for state in states]
        for state in states:
            state.zero_()
        logs, others = logs_apart(work(), results)
        if not share.samples:  # a sample that is here to keep step
            for state in states:
                state.zero_()
        if phase not in self._local or not any(bool(state.count_nonzero()) for state in before):
            self._local[phase] = [state.new_zeros(state.shape) for state in states]
        for local, state in zip(self._local[phase], states, strict=True):
            local.add_(state)
        names = sorted(logs)
        numbers = [float(logs[n]) if n in others or logs[n].numel() == 1 else 0.0 for n in names]
        values = [one * share.samples if share.samples else 0.0 for one in numbers]
        mark = zlib.crc32(torch.get_rng_state().numpy().tobytes()) & 0xFFFF
        tail = torch.tensor(
            [*values, *(n in others for n in names), mark, mark * mark], dtype=torch.float64, device=self._world.device
        )
        flat = torch.cat([*(state.reshape(-1).to(tail) for state in states), tail])
        if self._world.size > 1:
            with comm.label("keras metrics"):
                dist.all_reduce(flat, group=self._world.group)
        for state, earlier, part in zip(states, before, views_like(flat[: -len(tail)], states), strict=True):
            state.copy_((earlier.double() + part.to(state.device)).to(state.dtype))
        *told, marks, squares = flat[-len(tail) :].tolist()
        if self._world.size * squares != marks * marks:
            torch.set_rng_state(self._world.from_root(torch.get_rng_state()))
        found = each_log(results())
        each = zip(names, told[: len(names)], told[len(names) :], strict=True)
        return {name: total / share.total if other else found[name] for name, total, other in each}

    def follow(self, root: int, world: World, others: list[Any]) -> None:
        """Take what a rank that has done steps has in the metrics, on ranks that have not; a collective operation.

        `others` are variables of metrics that are no sums, which are sent too.
        """
        for phase in world.from_all(sorted(self._local))[root]:
            if phase not in self._local:
                self._local[phase] = [torch.zeros_like(variable.value.detach()) for variable in self.variables]
        values = [variable.value.detach() for variable in [*self.variables, *others]]
        values += [state for _, states in sorted(self._local.items()) for state in states]
        if not values:
            return
        flat = torch.cat([value.reshape(-1).to(self._world.device, torch.float64) for value in values])
        with comm.label("keras metrics"):
            dist.broadcast(flat, group=world.group, group_src=root)
        for value, part in zip(values, views_like(flat, values), strict=True):
            value.copy_(part)

    def of_this_rank(self, phase: str, results: Callable[[], dict[str, Any]]) -> dict[str, float]:
        """Return what `results` gives where the metrics hold this rank's own sums of the latest epoch or evaluation."""
        own = self._local.get(phase)
        if own is None:
            return {}
        states = [variable.value.detach() for variable in self.variables]
        kept = [state.clone() for state in states]
        for state, value in zip(states, own, strict=True):
            state.copy_(value)
        found = {name: float(value) for name, value in each_log(results()).items()}
        for state, value in zip(states, kept, strict=True):
            state.copy_(value)
        return found


def logs_apart(
    given: dict[str, Any], results: Callable[[], dict[str, Any]]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the logs that a step has given, by name, and the names of those that are not what metrics say."""
    logs = {name: _tensor(value) for name, value in each_log(given).items()}
    own = {name: _tensor(value) for name, value in each_log(results()).items()}
    return logs, {name for name, value in logs.items() if name not in own or not _equal(value, own[name])}


def each_log(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs of which none is several, as a metric or a step may give them, and as Keras takes them apart."""
    each = [each_log(one) if isinstance(one, dict) else {name: one} for name, one in logs.items()]
    return {name: value for some in each for name, value in some.items()}


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(getattr(value, "value", value)).detach().double()  # of a tensor, a number or a variable


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    return value.shape == other.shape and bool(torch.isclose(value, other, rtol=0, atol=0, equal_nan=True).all())
