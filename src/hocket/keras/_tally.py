"""Metrics over all ranks' samples: what each rank's step adds to them is summed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.batches import BatchShard
from hocket.parallel.mesh import World


class Tally:
    """The states of metrics that are sums over samples.

    In a step they begin from zero, so that what they hold after it is this rank's contribution; then all ranks'
    contributions are added, in float64, to what they were before. On the way one number tells whether the ranks' random
    generators still stand alike; where they do not (a torch layer drew numbers for its share), all take rank 0's.

    Args:
        variables: of the metrics.
        world: the ranks.
    """

    def __init__(self, variables: list[Any], world: World) -> None:
        self._variables = variables
        self._world = world
        self._local: dict[str, list[torch.Tensor]] = {}  # sums of this rank alone, in training and in evaluation

    def step(
        self, work: Callable[[], dict[str, Any]], share: BatchShard, metric_names: Callable[[], set[str]], phase: str
    ) -> dict[str, float]:
        """Runs `work` and adds up over ranks what it adds to the metrics; a collective operation.

        Args:
            work: a step of the model's, which returns logs.
            share: this rank's part of the batch.
            metric_names: tells the names of logs that are metrics; others are averaged over samples.
            phase: "train" or "test".

        Returns:
            The logs that are no metrics.
        """
        states = [variable.value.detach() for variable in self._variables]
        before = [state.clone() for state in states]
        for state in states:
            state.zero_()
        logs = work()
        if not share.samples:  # a sample that is here to keep step
            for state in states:
                state.zero_()
        if not any(bool(state.count_nonzero()) for state in before):
            self._local[phase] = [state.new_zeros(state.shape) for state in states]
        for local, state in zip(self._local[phase], states, strict=True):
            local.add_(state)
        names = sorted(set(logs) - metric_names())
        values = [_number(logs[name]) * share.samples if share.samples else 0.0 for name in names]
        mark = zlib.crc32(torch.get_rng_state().numpy().tobytes()) & 0xFFFF
        tail = torch.tensor([*values, mark, mark * mark], dtype=torch.float64, device=self._world.device)
        flat = torch.cat([*(state.reshape(-1).to(tail) for state in states), tail])
        if self._world.size > 1:
            with comm.label("keras metrics"):
                dist.all_reduce(flat, group=self._world.group)
        begin = 0
        for state, earlier in zip(states, before, strict=True):
            part = flat[begin : begin + state.numel()].view(state.shape).to(state.device)
            state.copy_((earlier.double() + part).to(state.dtype))
            begin += state.numel()
        *sums, marks, squares = flat[begin:].tolist()
        if self._world.size * squares != marks * marks:
            torch.set_rng_state(self._world.from_root(torch.get_rng_state()))
        return {name: total / share.total for name, total in zip(names, sums, strict=True)}

    def follow(self, root: int, world: World, others: list[Any]) -> None:
        """Takes what a rank that has done steps has in the metrics, on ranks that have not; a collective operation.

        Args:
            root: the rank that has.
            world: the ranks.
            others: variables of metrics that are no sums, which are sent too.
        """
        for phase in world.from_all(sorted(self._local))[root]:
            if phase not in self._local:
                self._local[phase] = [torch.zeros_like(variable.value.detach()) for variable in self._variables]
        values = [variable.value.detach() for variable in [*self._variables, *others]]
        values += [state for _, states in sorted(self._local.items()) for state in states]
        if not values:
            return
        flat = torch.cat([value.reshape(-1).to(self._world.device, torch.float64) for value in values])
        with comm.label("keras metrics"):
            dist.broadcast(flat, group=world.group, group_src=root)
        begin = 0
        for value in values:
            value.copy_(flat[begin : begin + value.numel()].view(value.shape))
            begin += value.numel()

    def of_this_rank(self, phase: str, results: Callable[[], dict[str, Any]]) -> dict[str, float]:
        """What `results` gives where the metrics hold this rank's own sums of the latest epoch or evaluation."""
        own = self._local.get(phase)
        if own is None:
            return {}
        states = [variable.value.detach() for variable in self._variables]
        kept = [state.clone() for state in states]
        for state, value in zip(states, own, strict=True):
            state.copy_(value)
        found = {name: float(value) for name, value in results().items()}
        for state, value in zip(states, kept, strict=True):
            state.copy_(value)
        return found


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
