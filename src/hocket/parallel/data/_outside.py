"""Sees that what a loop calls or trains besides its models (a loss module, a temperature) is the same on all ranks."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import tensors_in
from ..mesh import World

_TOLERANCE = 1e-5  # of a sum of absolute values: hosts of different processors round the last place differently
_STEPS = 6  # in which tensors that are trained besides are compared: Adam's first step is the same for any gradient
_NOTES = 16 * _STEPS  # back-propagations that are looked at: a step has some, in parts of its batch
_PASSES = 2  # back-propagations in which is looked: what a loss module keeps has changed by the second


class OutsideModules:
    """Notes modules that are called in the first steps, and compares what ranks have in them."""

    def __init__(self, known: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._known = known
        self._called: dict[int, tuple[weakref.ref[torch.nn.Module], set[int]]] = {}
        self._made: dict[int, set[int]] = {}  # where the outputs are, by the module that gave them
        self._losses = set[float]()
        self._left = _PASSES
        self._handle: Any = None

    def watch(self) -> None:
        """Begin to note modules; torch.compile would have to compile again for it."""
        if self._handle is None and self._left and not any(map(_is_compiled, self._known())):
            called, made = self._called, self._made

            def note(module: torch.nn.Module, _: Any, output: Any) -> None:
                if module._buffers or module._parameters or any(map(torch.is_tensor, vars(module).values())):
                    marks = torch_adapter.graph_marks(tensors_in(output))
                    called[id(module)] = (weakref.ref(module), marks)
                    made.setdefault(id(module), set()).update(map(_place, tensors_in(output)))

            self._handle = register_module_forward_hook(note)
            weakref.finalize(self, self._handle.remove)

    def compare(self, loss: torch.Tensor, world: World) -> None:
        """Compare ranks in the first back-propagations; a collective operation.

        Raises:
            RuntimeError: a module that is not distributed holds something else on another rank.
        """
        if not self._left:
            return
        self._left -= 1
        mine = self._held(loss)
        if not self._left and self._handle is not None:
            self._handle.remove()
            self._called.clear()
            self._made.clear()
        everyone = world.from_all(mine)
        if any([key for key, _ in one] != [key for key, _ in mine] for one in everyone):
            return  # ranks call other modules each
        for place, ((kind, name, batch_norm), _) in enumerate(mine):
            sizes = [one[place][1] for one in everyone]
            if _are_alike(sizes):
                continue
            what = f"{name!r} of the {kind} that the loop calls besides its model is not the same on all ranks"
            if not batch_norm:
                raise RuntimeError(
                    f"{what} (sums of absolute values: {', '.join(f'{one:.6g}' for one in sizes)}): each has a "
                    "statistic of its own samples, or began with other numbers. Give hocket.average of a statistic to "
                    "it, seed all ranks alike before it is made, or distribute it, too"
                )
            if world.rank == 0 and not self._left:
                warn(f"{what}: batch norm there has the statistics of a rank's own samples")
            return

    def _is_result(self, one: torch.Tensor, key: int, *, holder: bool) -> bool:
        """Return whether it is only what the module has made of a rank's samples, kept for a log: an output or a loss.

        That of the step before is one, too, since a log may be written after the update; and so is any single number
        of a module that holds the model, whose loss may be divided. What the next loss depends on is looked at itself.
        """
        if one.numel() == 1 and (holder or (not one.is_meta and not one.is_complex() and float(one) in self._losses)):
            return True
        return _place(one) in self._made.get(key, ())

    def _held(self, loss: torch.Tensor) -> list[tuple[tuple[str, str, bool], float]]:
        known = {id(inner) for module in self._known() for inner in module.modules()}
        if loss.numel() == 1 and not loss.is_complex():
            self._losses.add(float(loss.detach()))
        found = []
        for key, (reference, marks) in self._called.items():
            module = reference()
            if module is None or key in known:
                continue
            tensors = {**module._parameters, **module._buffers}
            if torch_adapter.reaches(loss, marks):  # a metric may keep what it likes
                kept = {name: one for name, one in vars(module).items() if torch.is_tensor(one)}
                holder = any(id(inner) in known for inner in module.modules())
                tensors |= {name: one for name, one in kept.items() if not self._is_result(one, key, holder=holder)}
            norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            for name, one in tensors.items():
                if one is not None and _is_summed(one):
                    found.append(((type(module).__name__, name, norm), _size(one)))
        return found


class OutsideTensors:
    """Notes tensors besides the models' parameters that get gradients, and compares ranks in their first steps.

    So are a learned temperature, the weights of tasks, a multiplier: nobody averages their gradients.
    """

    def __init__(self, known: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._known = known
        self._first: Any = WeakTensorKeyDictionary()  # what a tensor was, as a sum, when it was noted
        self._left, self._notes = _STEPS, _NOTES

    def note(self, root: torch.Tensor) -> None:
        """Note what gets gradients by a back-propagation that begins."""
        if self._left and self._notes:
            self._notes -= 1
            known = {id(one) for module in self._known() for one in module.parameters()}
            for one in torch_adapter.leaves(root):
                plain = type(one) in (torch.Tensor, torch.nn.Parameter) and _is_summed(one)
                if plain and id(one) not in known and one not in self._first:
                    self._first[one] = _size(one)

    def compare(self, samples: int, world: World) -> None:
        """Compare ranks in the first back-propagations of `samples` of this rank; a collective operation.

        Raises:
            RuntimeError: a tensor that was the same on all ranks is not so any more.
        """
        if not self._left:
            return
        self._left -= 1
        mine = [(tuple(one.shape), first, _size(one), samples) for one, first in self._first.items()]
        everyone = world.from_all(mine)
        if len({len(one) for one in everyone}) > 1:
            return
        for each in zip(*everyone, strict=True):
            shapes, firsts, sizes, rows = zip(*each, strict=True)
            # What has a place for each sample on all ranks, as a perturbation of images, is a rank's own.
            placed = max(rows) > 1 and all(shape[:1] == (n,) for shape, n in zip(shapes, rows, strict=True))
            alike = not placed and len(set(shapes)) == 1 and _are_alike(firsts)
            if alike and not _are_alike(sizes):
                raise RuntimeError(
                    f"a tensor of the shape {list(shapes[0])} that the program trains besides its model (a "
                    "temperature, the weight of a task, a multiplier) is not the same on all ranks any more (sums of "
                    f"absolute values: {', '.join(f'{one:.6g}' for one in sizes)}): its gradient is that of a rank's "
                    "own samples. Make it an nn.Parameter of the module that hocket.distribute is given, or set its "
                    ".grad to hocket.average of it before the update"
                )


def _are_alike(sizes: Sequence[float]) -> bool:
    """Return whether sums of absolute values are the same; one that is no number says nothing."""
    return max(sizes) - min(sizes) <= _TOLERANCE * max(sizes) or any(one != one for one in sizes)


def _size(one: torch.Tensor) -> float:
    return float(one.detach().double().abs().sum())


def _is_summed(one: torch.Tensor) -> bool:
    return not one.is_meta and not one.is_complex() and one.layout is torch.strided


def _place(tensor: torch.Tensor) -> int:
    """Return where a dense tensor's numbers are; of others, who they are."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or torch_adapter.in_transform():  # of torch.func, whose tensors have no storage
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _is_compiled(module: torch.nn.Module) -> bool:
    return any(
        "_orig_mod" in one._modules or getattr(one, "_compiled_call_impl", None) is not None for one in module.modules()
    )
