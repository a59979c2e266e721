"""Resuming a loop of the program's own, after a preemption or a time limit: what `Trainer.resume` is to the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..batches import DistributedLoader, own_generators, put_back_generators, state_of
from ..data import DataParallel
from ..state import CheckpointError
from ..state.checkpoint import check_place, exists
from ..state.objects import read_objects, write_objects
from ._preemption import Preemption


def resume(
    path: str | Path,
    loader: DistributedLoader | Sequence[DistributedLoader],
    *,
    extra: Callable[[], Any] | None = None,
    weights_only: bool = True,
    **objects: Any,
) -> Any:
    """Go on where a run of the program was told to end, if one was, and save there should this one be.

    A collective operation, called once, after `hocket.distribute` and before the loop. From here on SIGTERM and SIGUSR1
    (a preemption, Slurm's `--signal=USR1@90`, an eviction, `kill`) write a checkpoint when the program has done with
    the batch that all ranks have in hand, and end the program: with exit status 75, or, under `hocket run`, so that
    this gives 75. The next run takes the rest of that epoch's batches first. Any number of ranks may go on.

    Args:
        path: a directory for the checkpoint, which all hosts share.
        loader: the loader that `hocket.distribute` has returned; signals are minded between its batches. Of several (a
            list or tuple) they are minded between those of the first: make it the one of the outer loop.
        extra: gives what else is to be kept, when that is saved: the number of the epoch, the best loss.
        weights_only: whether what is more than plain values, tensors and arrays is refused (objects that `extra` gives,
            or in a state), since unpickling it can run code, as `torch.load` has it.
        objects: by names of your choice all that changes as the program trains and has a `state_dict`: models,
            optimizers, schedules, gradient scalers. Gradients that models have are kept, too.

    Returns:
        What `extra` gave in the run before; None where there is no checkpoint yet.

    Raises:
        TypeError: an object has no `state_dict`, or the loader is not one of `hocket.distribute`.
        ValueError: this is not the main thread.
        CheckpointError: the checkpoint is damaged, of other objects, or of the Trainer; ranks do not share it; or none
            could be written there.

    Example::

        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        state = hocket.resume("checkpoint", loader, model=model, optimizer=optimizer, extra=lambda: {"epoch": epoch})
        for epoch in range(state["epoch"] if state else 0, 3):
            for x, y in loader:
                ...
    """
    given_loaders = loader if isinstance(loader, list | tuple) else [loader]
    loaders = [one for one in given_loaders if isinstance(one, DistributedLoader)]
    if not loaders or len(loaders) < len(given_loaders):
        raise TypeError("resume: pass the loader that hocket.distribute has returned, or all of them")
    first = loaders[0]
    for name, one in objects.items():
        if not (callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))):
            raise TypeError(f"resume: {name}={type(one).__name__} has no state_dict; keep plain values by extra=")
    path, world, given = Path(path), first.world, extra or (lambda: None)
    modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
    inner = [one for module in modules.values() for one in module.modules()]
    found = None
    if exists(path, world):
        found = _load(read_objects(path, world, weights_only=weights_only), path, objects, modules)
        positions = [found["loader"], *found.get("loaders", [])]
        if len(positions) != len(loaders):
            raise CheckpointError(
                f"the checkpoint at {str(path)!r} is of {len(positions)} loaders, and resume was given {len(loaders)}: "
                "pass the same ones in the same order, or another path"
            )
        for one, position in zip(loaders, positions, strict=True):
            one.resume(position)
        if states := found.get("generators"):
            put_back_generators(states[world.rank % len(states)], *inner)
    check_place(path, world)
    place = path.absolute()  # the program may change its directory

    def save() -> None:
        states = {name: one.state_dict() for name, one in objects.items()}
        gradients = {
            name: {key: p.grad for key, p in one.named_parameters() if p.grad is not None}
            for name, one in modules.items()
        }
        state = {"objects": states, "gradients": gradients, "extra": given()}
        state["loader"], *state["loaders"] = [one.position() for one in loaders]
        state["draws"] = {name: one.draws_own for name, one in modules.items() if isinstance(one, DataParallel)}
        generators = world.from_all([state_of(one) for one in own_generators(*inner)])
        write_objects(place, {**state, "generators": generators, "marks": _marks(objects, modules)}, world)

    first.between = None
    preemption = Preemption(world, path, save)

    def between() -> None:
        # Gradients that add up on each rank alone (`no_sync`) are not in the checkpoint: wait for their average.
        if not any(one.holds_back for one in modules.values() if isinstance(one, DataParallel)):
            preemption.check()

    first.between = between
    return None if found is None else found["extra"]


def _marks(objects: dict[str, Any], modules: dict[str, torch.nn.Module]) -> dict[str, dict[str, str]]:
    """Return what the objects' own `load_state_dict` takes over without a look: types, kinds, an optimizer's order."""
    names = {id(one): f"{name}.{key}" for name, module in modules.items() for key, one in module.named_parameters()}
    marks = {}
    for name, one in objects.items():
        if name in modules:
            state = one.state_dict().items()
            marks[name] = {key: str(value.dtype) for key, value in state if isinstance(value, torch.Tensor)}
            continue
        updated = [p for group in getattr(one, "param_groups", ()) for p in group["params"]]
        order = {f"parameter {i}": names[id(p)] for i, p in enumerate(updated) if id(p) in names}
        marks[name] = {"kind": type(one).__name__, **order}
    return marks


def _load(
    found: dict[str, Any], path: Path, objects: dict[str, Any], modules: dict[str, torch.nn.Module]
) -> dict[str, Any]:
    """Give the objects their states."""
    states = found["objects"]
    if states.keys() != objects.keys():
        raise CheckpointError(
            f"the checkpoint at {str(path)!r} has the states of {', '.join(states)}, and resume was given "
            f"{', '.join(objects)}: pass the same names, or another path"
        )
    marks = _marks(objects, modules)
    for name, saved in found.get("marks", {}).items():
        for key, there in saved.items():
            if (here := marks[name].get(key, there)) != there:
                raise CheckpointError(
                    f"the checkpoint at {str(path)!r} is of another {name!r}: its {key} was {there}, and is {here}; "
                    "pass what was saved, or another path"
                )
    for name, one in objects.items():
        try:
            one.load_state_dict(states[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"the checkpoint at {str(path)!r} is of another {name!r}: {error}") from error
    for name, module in modules.items():
        parameters = dict(module.named_parameters())
        for key, gradient in found["gradients"][name].items():
            parameters[key].grad = gradient.to(parameters[key].device)
        own = found.get("draws", {}).get(name)
        if isinstance(module, DataParallel) and own is not None:
            module.draws_own = own
    return found
