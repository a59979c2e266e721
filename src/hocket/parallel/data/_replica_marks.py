"""Notices replicas that drift apart: by other batches, settings of the optimizer, numbers of updates, or weights."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from hocket import comm
from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ..batches import due
from ..mesh import World
from ._hooks import has_changed_gradients
from ._other_libraries import tell_own_schedules

_BITS: Final = 32  # an order of blocks that differs does so in every step: it would pass for another in one of 4e9
_DRAWN: Final = 256  # indices of a batch that are compared: beyond a thousand they would take time in each step
_ELEMENTS: Final = 4096
_TOLERANCE: Final = 1e-5  # of a sum of weights: hosts of different processors round the last place differently


def marks_of(value: Any) -> list[float]:
    """Return numbers of one size each, whose signs are a digest of what `repr` says of a value."""
    digest = hashlib.sha256(repr(value).encode()).digest()
    return [1.0 if digest[i // 8] >> i % 8 & 1 else -1.0 for i in range(_BITS)]


def alike(sums: Iterable[float], ranks: int) -> bool:
    """Return whether the sums of so many ranks' marks are those of one value on all."""
    return all(abs(one) > ranks - 0.5 for one in sums)


class ReplicaMarks:
    """What this rank's replica is like, in few numbers whose sums over ranks tell whether all are alike.

    One parameter is looked at in each check, the next in the next: most that changes weights changes all of them.
    """

    SIZE: Final = _BITS + 2

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._passes = 0
        self._parameters = list(parameters.items())
        self._optimizers: list[tuple[weakref.ref[Any], list[int]]] = []
        self._checks = 0
        self._first: list[list[dict[str, str]]] | None = []  # settings, until they have changed

    def follow(self, optimizer: Any, *, counted: bool = True) -> None:
        """Look at an optimizer's settings, and if `counted` at how often it updates."""
        updates = [0]

        @torch_adapter.outside_compiler
        def updated(*_: Any) -> None:
            updates[0] += 1

        if counted and (steps := torch_adapter.steps_of(optimizer)) is not None:
            steps.register_step_post_hook(updated)
        self._optimizers.append((weakref.ref(optimizer), updates))

    @property
    def updates(self) -> int:
        """How often the optimizers have updated."""
        return sum(updates for _, (updates,) in self._optimizers)

    def compare(
        self, world: World, more: Callable[[], Sequence[float]] = tuple, *, now: bool = False
    ) -> list[float] | None:
        """Compare in a sum of their own, in the calls that are powers of two and in every 32nd; a collective operation.

        `now` has it done in this call, which is not counted.

        Returns:
            The sums over ranks of what `more` gives then; None in other calls.

        Raises:
            RuntimeError: See `check`.
        """
        self._passes += not now
        if not now and not due(self._passes):
            return None
        sums = torch.cat([self.numbers(), torch.tensor(more(), dtype=torch.float64)]).to(world.device)
        with comm.label("replicas compared"):
            world.all_reduce(sums)
        self.check(sums[: self.SIZE], world)
        found: list[float] = sums[self.SIZE :].tolist()
        return found

    def numbers(self) -> torch.Tensor:
        """Return this rank's marks, to be summed over ranks: float64 of SIZE elements."""
        weight = self._weight()
        marks = marks_of((_drawn(), self._settings(), self._changed()))
        return torch.tensor([*marks, weight, weight * weight], dtype=torch.float64)

    def check(self, sums: torch.Tensor, world: World) -> None:
        """Compare; on every rank alike. Raises RuntimeError: ranks have different settings, or different weights."""
        self.look_at_schedules(world)
        *marks, weight, square = sums.double().cpu().tolist()
        weight, square = weight / world.size, square / world.size
        if not alike(marks, world.size):
            drawn = world.from_all(_drawn())
            note = _batch.trained()
            numbers = world.from_all(1 if note is None else note.number)
            if (rank := next((rank for rank, one in enumerate(drawn) if one != drawn[0]), 0)) > 0:
                if numbers[rank] != numbers[0]:
                    raise RuntimeError(
                        f"rank {rank} back-propagates batch {numbers[rank]} of a pass of the loader while rank 0 does "
                        f"so with batch {numbers[0]}: one of them has left out a back-propagation, or made one more (a "
                        "`continue`, a second backward(), a condition on its own samples). All make equally many: "
                        "decide by hocket.average or hocket.total of the number, called on every rank"
                    )
                raise RuntimeError(
                    f"rank {rank} has taken its samples from another batch than rank 0 (of {_begin(drawn[rank])} and "
                    f"{_begin(drawn[0])}): the sampler or data set goes by what a rank alone has seen, as the losses "
                    "of its own samples, or a rank has taken a batch that others have not. Give it numbers that are "
                    "the same on all ranks: hocket.total of a tensor with a place for each sample, say"
                )
            changed = world.from_all(self._changed())
            for name in sorted({name for names in changed for name in names}):
                ranks = [rank for rank, names in enumerate(changed) if name in names]
                if len(ranks) < world.size:
                    raise RuntimeError(
                        f"a hook of the program on rank {ranks[0]} has changed the gradient of {name!r}, and other "
                        "ranks' have not, so that their models drift apart: register it on every rank"
                    )
            everyone = world.from_all(self._settings())
            other = next(rank for rank, one in enumerate(everyone) if one != everyone[0])
            raise RuntimeError(
                "the optimizer is not the same on all ranks, so that their models drift apart: "
                f"{_difference(everyone[0], everyone[other], other)}. The program has decided by what one rank alone "
                "has seen, as the loss of its own samples: decide by hocket.average(loss), which is the same on all"
            )
        name, parameter = self._parameters[self._checks % len(self._parameters)] if self._parameters else ("", None)
        self._checks += 1
        if parameter is None or not math.isfinite(square):
            return
        rounds = parameter.is_floating_point() or parameter.is_complex()  # whole numbers (quantized weights) do not
        tolerance = max(_TOLERANCE, 8 * torch.finfo(parameter.dtype).eps) if rounds else _TOLERANCE
        if square - weight * weight > (tolerance * weight) ** 2 + 1e-14 * square:
            raise RuntimeError(
                f"parameter {name!r} is no longer the same on all ranks: something has changed it on one of them, or "
                "differently on each. Make every change on all ranks alike: random ones with one seed, checkpoints "
                "loaded by each rank, decisions by hocket.average(loss)"
            )

    def compare_gradients(self, world: World) -> None:
        """Compare gradients that no back-propagation has averaged; a collective operation.

        Raises:
            RuntimeError: ranks have different ones.
        """
        size = sum(
            float(p.grad.abs().sum(dtype=torch.float64)) * (1 + i / 7)
            for i, (_, p) in enumerate(self._parameters)
            if p.grad is not None and p.grad.layout is torch.strided
        )
        sums = torch.tensor([size, size * size], dtype=torch.float64, device=world.device)
        with comm.label("gradients compared"):
            world.all_reduce(sums)
        mean, square = (sums / world.size).tolist()
        if square - mean * mean > (_TOLERANCE * mean) ** 2 + 1e-14 * square:
            raise RuntimeError(
                "optimizer.step() takes gradients that no backward() of the model has averaged, and they differ from "
                "rank to rank: the program has put them into .grad itself (per-sample gradients of torch.func, the way "
                "that an inner loop went), or has added them up in no_sync. Before the step write "
                "parameter.grad = hocket.average(parameter.grad) for each parameter, on every rank"
            )

    def look_at_schedules(self, world: World) -> None:
        """Look at other libraries' schedules once, when an optimizer's settings are no longer what they were.

        Nothing is exchanged: it is for ranks that are not alike, too.
        """
        if self._first is None:
            return
        settings = [groups for _, groups in self._settings()]
        if any(now != before for now, before in zip(settings, self._first, strict=False)):
            self._first = None
            tell_own_schedules(world, [one for reference, _ in self._optimizers if (one := reference()) is not None])
        else:
            self._first = settings

    def _settings(self) -> list[tuple[Any, ...]]:
        found = []
        for reference, (updates,) in self._optimizers:
            optimizer = reference()
            groups = [] if optimizer is None else optimizer.param_groups
            settings = [
                {name: said for name, value in group.items() if name != "params" and (said := _said(value))}
                for group in groups
            ]
            found.append((updates, settings))
        return found

    def _changed(self) -> list[str]:
        """Return the parameters whose gradients hooks of the program were seen to change."""
        return [name for name, one in self._parameters if has_changed_gradients(one)]

    def _weight(self) -> float:
        if not self._parameters:
            return 0.0
        tensor = self._parameters[self._checks % len(self._parameters)][1].detach()
        while tensor.dim() > 1 and tensor.numel() > _ELEMENTS:
            tensor = tensor[0]
        some = tensor.flatten()[:_ELEMENTS]
        return float((some if some.is_complex() else some.double()).abs().double().sum())


def _drawn() -> list[str]:
    """Return what tells the latest batch that ranks share: indices, sizes, whole numbers that hosts compute alike."""
    note = _batch.trained()
    drawn = () if note is None else note.drawn
    return [repr(one) for one in drawn[:_DRAWN] if not isinstance(one, float) or one.is_integer()]


def _begin(drawn: list[str]) -> str:
    return ", ".join(drawn[:4]) + ", ..." * (len(drawn) > 4)


def _said(value: Any) -> str:
    """Return a setting as six digits say it: hosts compute cosines that differ in the last place."""
    if isinstance(value, torch.Tensor):
        value = float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return ", ".join(map(_said, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, int | str) else ""


def _difference(first: Any, other: Any, rank: int) -> str:
    for (updates, groups), (other_updates, other_groups) in zip(first, other, strict=True):
        for group, other_group in zip(groups, other_groups, strict=False):
            for name in group:
                if group[name] != other_group.get(name):
                    return f"{name} is {group[name]} on rank 0 and {other_group.get(name)} on rank {rank}"
        if updates != other_updates:
            return f"rank 0 has made {updates} updates and rank {rank} {other_updates}"
    return f"other groups of parameters on rank {rank} than on rank 0"
