"""Checkpoints that know nothing of the plan they were written under: torch's DCP files, under the model's own names."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..batches import RngStates
from ..mesh import World
from ._owned import Owned
from ._shards import TensorShard

_ABOUT = "about"  # what is no tensor of the model's shapes
_MODEL, _OPTIMIZER = "model.", "optimizer."


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is of another model."""


def write(
    path: Path,
    tensors: Iterable[TensorShard],
    owned: Iterable[Owned],
    optimizer: Any,
    about: dict[str, Any],
    world: World,
) -> None:
    """Write a checkpoint; a collective operation.

    Args:
        path: A directory; what was there is replaced when all has been written.
        tensors: What this rank holds of parameters and buffers.
        owned: What its optimizer updates.
        optimizer: The optimizer.
        about: All else that is to be kept, by name; rank 0's counts.
        world: All ranks.
    """
    from . import _dcp  # lazy: it takes a second

    owned = list(owned)
    shards = [_renamed(shard, _MODEL + shard.name) for shard in tensors]
    scalars: dict[str, dict[str, Any]] = {}
    for item in owned:
        for key, value in optimizer.state.get(item.leaf, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == item.leaf.shape and value.ndim:
                shards += [_renamed(shard, _key(item.name, key)) for shard in item.shards(value)]
            else:
                scalars.setdefault(item.name, {})[key] = value
    everywhere: dict[str, dict[str, Any]] = {}
    states = []
    for mine, state in world.from_all((scalars, _random_state())):
        everywhere.update(mine)
        states.append(state)
    about = {**about, "optimizer_scalars": everywhere, "random": states, "groups": _settings(optimizer)}
    new, old = (path.with_name(path.name + end) for end in (".new", ".old"))
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
    world.from_root(None)
    _dcp.save(new, shards, {_ABOUT: about} if world.rank == 0 else {}, world)
    if world.rank == 0:  # whoever is killed here leaves the old checkpoint or the new one, whole
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    world.from_root(None)


def read(
    path: Path, tensors: Iterable[TensorShard], owned: Iterable[Owned], optimizer: Any, world: World
) -> dict[str, Any]:
    """Read a checkpoint that was written under any plan into what this rank holds; a collective operation.

    Args:
        path: The directory.
        tensors: What this rank holds of parameters and buffers; overwritten.
        owned: What its optimizer updates.
        optimizer: The optimizer, which gets the state and the settings that were saved.
        world: All ranks.

    Returns:
        `about`, as it was given to `write`.

    Raises:
        CheckpointError: there is none at `path`, or it is of another model; names what differs.
    """
    from . import _dcp  # lazy: it takes a second

    try:
        metadata = _dcp.saved_tensors(path)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}: {error}") from None
    owned = list(owned)
    shards = [_renamed(shard, _MODEL + shard.name) for shard in tensors]
    _check(path, shards, metadata)
    states: dict[int, dict[str, Any]] = {}
    for item in owned:
        prefix = _key(item.name, "")
        for name, saved in metadata.items():
            if name.startswith(prefix):
                value = torch.zeros_like(item.leaf.detach(), dtype=saved.properties.dtype)
                states.setdefault(id(item.leaf), {})[name[len(prefix) :]] = value
                shards += [_renamed(shard, name) for shard in item.shards(value)]
    about: dict[str, Any] = _dcp.load(path, shards, _ABOUT, world)
    optimizer.state.clear()
    scalars = about.get("optimizer_scalars", {})  # DCP leaves out a table without entries, as plain SGD's
    for item in owned:
        state = {**scalars.get(item.name, {}), **states.get(id(item.leaf), {})}
        if state:
            optimizer.state[item.leaf] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    for group, settings in zip(optimizer.param_groups, about["groups"], strict=True):
        group.update(settings)
    _set_random_state(about["random"][world.rank % len(about["random"])])
    return about


def _check(path: Path, shards: list[TensorShard], metadata: dict[str, Any]) -> None:
    for shard in shards:
        found = metadata.get(shard.name)
        name = shard.name.removeprefix(_MODEL)
        if found is None:
            raise CheckpointError(f"the checkpoint at {str(path)!r} has no {name!r}: it is of another model")
        if tuple(found.size) != tuple(shard.shape):
            raise CheckpointError(
                f"{name!r} has the shape {list(shard.shape)} here and {list(found.size)} in the checkpoint at "
                f"{str(path)!r}: it is of another model"
            )


def _renamed(shard: TensorShard, name: str) -> TensorShard:
    return TensorShard(name, shard.shape, shard.offsets, shard.tensor)


def _key(name: str, key: str) -> str:
    return f"{_OPTIMIZER}{name}/{key}"


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _random_state() -> dict[str, Any]:
    states = RngStates.now()
    cuda = torch.cuda.get_rng_state() if _uses_cuda() else None
    return {"torch": states.torch_state, "python": states.python_state, "numpy": states.numpy_state, "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    RngStates(state["torch"], state["python"], state["numpy"]).install()
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
