"""Sees that what a loop calls besides its models (a loss module, a teacher) is the same on all ranks."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from hocket._program import warn
from hocket.comm import torch_adapter

from ..batches import tensors_in
from ..mesh import World

_TOLERANCE = 1e-5  # of a sum of absolute values: hosts of different processors round the last place differently
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
            if max(sizes) - min(sizes) <= _TOLERANCE * max(map(abs, sizes)) or any(one != one for one in sizes):
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
                if one is not None and not one.is_meta and not one.is_complex() and one.layout is torch.strided:
                    size = float(one.detach().double().abs().sum())
                    found.append(((type(module).__name__, name, norm), size))
        return found


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
