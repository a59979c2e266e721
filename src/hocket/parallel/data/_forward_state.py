"""Buffers that a forward pass changes, where a batch passes in parts: each as one pass of the whole batch leaves it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hocket._program import warn
from hocket.comm import torch_adapter
from hocket.sharding import same_values

from ..mesh import World
from ._batch_norm import SynchronisedBatchNorm

_NAMED = 3  # modules of a kind in a warning
Modules = Sequence[tuple[torch.nn.Module, Mapping[str, str]]]
_CLOSE = 1e-4
"""Relative: what parts of a batch leave in a buffer is what the batch leaves, but for rounding in float32."""


@dataclass
class ChangedBuffer:
    """A buffer, or an attribute that is a tensor, that a forward pass changes."""

    owner: torch.nn.Module  # the module that holds it, perhaps as another tensor after each pass
    local: str  # the module's name for it
    name: str  # the model's name for it
    # "same" if what a pass leaves does not depend on the samples (a power iteration, a counter), "mean" if it is a mean
    # over samples (a moving average of activations), "other" if it is neither
    kind: str
    off: float  # how far it is from that of one device if nothing is done, relative

    @property
    def buffer(self) -> torch.Tensor:
        """The tensor, as it is now."""
        found = _places(self.owner)[self.local]
        assert found is not None
        return found


@dataclass
class _Step:
    """Of one module in one step: its buffers at the beginning, passes so far, and sums of what they left."""

    start: list[torch.Tensor] = field(default_factory=list)
    passes: int = 0
    means: list[torch.Tensor] = field(default_factory=list)


class ForwardState:
    """Puts buffers back before every pass of a step but the first, so that all see what one pass would have seen.

    A buffer whose change does not depend on samples then ends as after one pass. One that is a mean over samples is
    averaged over passes and ranks by their samples.
    """

    def __init__(self, modules: Modules, data: World, found: Sequence[ChangedBuffer]) -> None:
        self._data = data
        self._kept: dict[int, tuple[list[ChangedBuffer], list[ChangedBuffer]]] = {}
        self._steps: dict[int, _Step] = {}
        self._weights: Callable[[int], float] | None = None
        for module, _ in modules:
            mine = {id(inner) for inner in module.modules()}
            same, mean = (
                [one for one in found if one.kind == kind and id(one.owner) in mine] for kind in ("same", "mean")
            )
            if same or mean:
                self._kept[id(module)] = (same, mean)
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def begin(self, weights: Callable[[int], float]) -> None:
        """Begin a step; `weights` gives the share of a pass in the global batch."""
        self._steps.clear()
        self._weights = weights if self._kept else None

    @torch.no_grad()
    def end(self) -> None:
        """End a step; a collective operation where a buffer is a mean over samples."""
        if self._weights is None:
            return
        for key, (_, mean) in self._kept.items():
            if not mean:
                continue
            sums = self._steps[key].means if key in self._steps else [torch.zeros_like(one.buffer) for one in mean]
            for one, total in zip(mean, sums, strict=True):
                if self._data.size > 1:
                    dist.all_reduce(total, group=self._data.group)
                one.buffer.copy_(total)
        self._weights = None

    @torch.no_grad()
    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if self._weights is None or torch_adapter.in_backward():
            return
        same, mean = self._kept[id(module)]
        step = self._steps.setdefault(id(module), _Step())
        if not step.passes:
            step.start = [one.buffer.detach().clone() for one in (*same, *mean)]
            step.means = [torch.zeros_like(one.buffer) for one in mean]
            return
        for one, start in zip((*same, *mean), step.start, strict=True):
            # Another micro-batch may still need what is in it for its backward: by then it holds the same again, or,
            # where that is not so, torch is to notice.
            (one.buffer.data if one.kind == "same" else one.buffer).copy_(start)

    @torch.no_grad()
    def _after(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._weights is None or torch_adapter.in_backward():
            return
        step = self._steps[id(module)]
        weight = self._weights(step.passes)
        step.passes += 1
        for total, one in zip(step.means, self._kept[id(module)][1], strict=True):
            if weight:
                total.add_(one.buffer, alpha=weight)


class StateProbe:
    """Finds what passes of a batch, and of its parts, leave in buffers."""

    def __init__(self, modules: Modules, skipped: Callable[[torch.nn.Module], bool]) -> None:
        self._places: dict[tuple[int, str], tuple[torch.nn.Module, str, str]] = {}
        for module, names in modules:
            for path, inner in module.named_modules():
                for local in () if skipped(inner) else _places(inner):
                    name = f"{path}.{local}".lstrip(".")
                    self._places.setdefault((id(inner), local), (inner, local, names.get(name, name)))
        self._start = self.now()

    def now(self) -> list[torch.Tensor | None]:
        """Return what is in the buffers; a program may give a module another tensor for one."""
        tensors = (_places(owner).get(local) for owner, local, _ in self._places.values())
        return [None if one is None else one.detach().clone() for one in tensors]

    @torch.no_grad()
    def left_by(self, run: Callable[[], Any]) -> list[torch.Tensor | None]:
        """Return what a run leaves in the buffers, and put them back."""
        held = [_places(owner).get(local) for owner, local, _ in self._places.values()]
        run()
        found = self.now()
        for (owner, local, _), tensor, start in zip(self._places.values(), held, self._start, strict=True):
            (owner._buffers if local in owner._buffers else vars(owner))[local] = tensor
            if tensor is not None and start is not None:
                tensor.copy_(start)
        return found

    def norms(self) -> list[ChangedBuffer]:
        """Return the buffers of batch norm, for want of runs that would tell how far they are off."""
        kind = torch.nn.modules.batchnorm._BatchNorm
        rows = [
            row for row, one in zip(self._places.values(), self._start, strict=True) if one is not None and one.dim()
        ]
        return [ChangedBuffer(*row, "other", float("nan")) for row in rows if isinstance(row[0], kind)]

    def changed(
        self,
        whole: Sequence[torch.Tensor | None],
        parts: Sequence[Sequence[torch.Tensor | None]],
        weights: Sequence[float],
    ) -> list[ChangedBuffer]:
        """Return the buffers that the whole batch changes.

        `whole` is what it leaves, `parts` what each of its parts leaves from the same beginning, `weights` their shares
        of the samples.
        """
        found = []
        for i, (owner, local, name) in enumerate(self._places.values()):
            after, start = whole[i], self._start[i]
            theirs = [one for part in parts if (one := part[i]) is not None]
            if after is None or (start is not None and after.shape == start.shape and same_values(after, start)):
                continue
            if start is None or any(not _comparable(one, start) for one in (after, *theirs)):
                found.append(ChangedBuffer(owner, local, name, "other", float("nan")))
                continue
            kind, off = "other", max(_distance(one, after) for one in theirs)
            if off <= _CLOSE:
                kind = "same"
            elif after.is_floating_point():
                mean = sum((one.double() * w for one, w in zip(theirs, weights, strict=True)), torch.zeros(()))
                kind = "mean" if _distance(torch.as_tensor(mean), after) <= _CLOSE else "other"
            kind = "other" if isinstance(owner, torch.nn.modules.batchnorm._BatchNorm) and kind == "mean" else kind
            found.append(ChangedBuffer(owner, local, name, kind, off))
        return found


def _places(owner: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's buffers, and attributes that are tensors.

    Where a module has parameters, its attributes may be computed from them in each forward, as the weight of
    `torch.nn.utils.spectral_norm`, and are not looked at.
    """
    buffers = dict(owner._buffers.items())  # torch.jit's are no dict
    if owner._parameters:
        return buffers
    return buffers | {name: one for name, one in vars(owner).items() if isinstance(one, torch.Tensor)}


def _comparable(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.layout is other.layout is torch.strided


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    a, b = one.double(), other.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if b.numel() else 0.0


def sizes_of_buffers(module: torch.nn.Module) -> dict[str, tuple[float, float]]:
    """Return the sum of each buffer and of its absolute values; of batch norm's none."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    owners = {name: one for name, one in module.named_modules() if not isinstance(one, norms)}
    named = ((name, one) for name, one in module.named_buffers() if name.rpartition(".")[0] in owners)
    doubles = ((name, one.detach().double()) for name, one in named if one.layout is torch.strided and one.numel())
    return {name: (float(one.sum()), float(one.abs().sum())) for name, one in doubles}


def buffers_apart(module: torch.nn.Module, ranks: Sequence[Mapping[str, tuple[float, float]]]) -> list[ChangedBuffer]:
    """Return the buffers that ranks had alike before a pass of a model, and have no more, by their sizes on each."""
    found = []
    for name in (name for name in ranks[0] if all(name in one for one in ranks)):
        size = max(one[name][1] for one in ranks)
        off = max(max(some) - min(some) for some in zip(*(one[name] for one in ranks), strict=True)) / (size or 1.0)
        path, _, local = name.rpartition(".")
        found += [ChangedBuffer(module.get_submodule(path), local, name, "other", off)] if off > _CLOSE else []
    return found


def tell(
    found: Sequence[ChangedBuffer], off: float, loss_differs: bool, cuts: Sequence[str], *, speak: bool
) -> list[str]:
    """Return a line for each kind of module whose state, or result, is not that of one device; warn of them.

    Args:
        found: Buffers that a forward pass changes.
        off: How far the loss is from that of the whole batch, relative, computed as it trains.
        loss_differs: Whether that is more than rounding.
        cuts: What cuts batches.
        speak: Whether this rank warns.
    """
    by_owner: dict[int, list[ChangedBuffer]] = {}
    for one in found:
        if one.kind == "other":
            by_owner.setdefault(id(one.owner), []).append(one)
    alike: dict[type, list[list[ChangedBuffer]]] = {}
    for some in by_owner.values():
        alike.setdefault(type(some[0].owner), []).append(some)
    how = " and ".join(cuts)
    lines = []
    for kind, owners in alike.items():
        names = [some[0].name.rpartition(".")[0] or "the model" for some in owners]
        modules = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        most: dict[str, float] = {}
        for one in itertools.chain.from_iterable(owners):
            most[one.name.rpartition(".")[2]] = max(one.off, most.get(one.name.rpartition(".")[2], 0.0))
        what = ", ".join(f"{name} by {off_by:.1g}" for name, off_by in most.items())
        remedy = "layer or group norm"
        if issubclass(kind, torch.nn.modules.batchnorm._BatchNorm):
            synchronised = any(isinstance(some[0].owner, SynchronisedBatchNorm) for some in owners)
            over_ranks = "" if synchronised else "sync_batch_norm = true (ranks only), "
            remedy = f"{over_ranks}layer or group norm, or .eval()"
            verb = f"normalises each part of a batch by itself with {how}, so that losses differ from one process's"
        else:
            remedy = "a plan that does not cut batches"
            verb = f"keeps a state that depends on the whole batch, and is rank 0's, part by part, with {how}"
        each, most_of = ("each of ", "at most ") if len(owners) > 1 else ("", "")
        lines.append(
            f"{each}{modules} ({kind.__name__}) {verb} (in the first samples: {most_of}{what}, relative); use {remedy}"
        )
    if loss_differs and lines:
        lines[-1] += f". The loss of these samples is {off:.1g} off"
    elif loss_differs:
        lines.append(
            f"the loss in training depends on which samples are computed together, by {off:.1g} of it with {how}, and "
            "no buffer tells which module is the cause"
        )
    for line in lines if speak else ():
        warn(line)
    return lines
