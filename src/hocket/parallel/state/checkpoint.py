"""Checkpoints that know nothing of the plan they were written under: torch's DCP files, under the model's own names."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..batches import RngStates, tensors_in
from ..mesh import World
from ._lock import goes_on, loaded, locked, saved
from ._manifest import ABOUT, EXTRA, MANIFEST, MODEL, OPTIMIZER, CheckpointError, Manifest, absolute, alike, is_whole
from ._owned import Owned
from ._replace import beside, fresh, fresh_token, replace, standing
from ._shards import TensorShard
from .whole import ModelOutline

PART = "hocket_part"
"""In an optimizer's state dict: the rank whose parts it is of, and how many ranks there are."""


def write(
    path: Path,
    tensors: Iterable[TensorShard],
    owned: Iterable[Owned],
    optimizer: Any,
    outline: ModelOutline,
    about: dict[str, Any],
    extra: Any,
    world: World,
) -> None:
    """Write a checkpoint; a collective operation.

    Args:
        path: A directory; the checkpoint that was there is replaced when all of this one is on the disk.
        tensors: What this rank holds of parameters and buffers.
        owned: What its optimizer updates.
        optimizer: The optimizer.
        outline: Of the whole model.
        about: All else that is to be kept, by name; rank 0's counts.
        extra: The user's, anything picklable; rank 0's counts.
        world: All ranks.

    Raises:
        CheckpointError: It cannot be written; what was at `path` before is still there.
    """
    from . import _dcp  # lazy: it takes a second

    with alike(world):
        path = absolute(path)
    said = world.from_root(str(path))
    owned = list(owned)
    with alike(world):
        _check_is_kept(optimizer, owned)
    moments, scalars = _state(optimizer, owned)
    shards = [*(_renamed(shard, MODEL + shard.name) for shard in tensors), *moments]
    everywhere: dict[str, dict[str, Any]] = {}
    states = []
    for mine, state in world.from_all((scalars, random_state())):
        everywhere.update(mine)
        states.append(state)
    about = {**about, "optimizer_scalars": everywhere, "random": states, "groups": _settings(optimizer)}
    about |= {"optimizer": type(optimizer).__name__, "members": outline.groups, "keys": outline.keys}
    others: dict[str, io.BytesIO] = {}
    new, made, kept = fresh(path, world.from_root(fresh_token())), False, None
    try:
        with locked(path, world):
            with alike(world):
                if world.rank == 0:
                    kept = None if goes_on(path, optimizer) else _of_another_model(path, outline)
                    others = {ABOUT: _pickled(about, "what it keeps"), EXTRA: _pickled(extra, "`extra`")}
                    make_space(path, new)
            made = True
            _check_shared(new, world)
            files = _dcp.save(new, shards, others, world)
            written = {name: entry for mine in world.from_all(files) for name, entry in mine.items()}
            with alike(world):
                if world.rank == 0:
                    Manifest(written).write(new)
                    if kept is not None:
                        path.rename(kept)
                        print(f"hocket: {path} was of another model: it is kept as {kept.name}", file=sys.stderr)
                    replace(new, path)
                    saved(path, optimizer)
    except CheckpointError as error:
        removed = made and not new.is_dir()
        if world.rank == 0:
            shutil.rmtree(new, ignore_errors=True)
        why: object = f"{new.name!r}, which it was written to, was removed: another program saves to the same path, say"
        why = why if world.from_root(removed) else error
        raise CheckpointError(f"the checkpoint {said!r} cannot be written: {why}") from None


def _state(optimizer: Any, owned: Iterable[Owned]) -> tuple[list[TensorShard], dict[str, dict[str, Any]]]:
    """Return an optimizer's state: what has an element for each of a parameter, and the rest by parameter and key."""
    shards: list[TensorShard] = []
    scalars: dict[str, dict[str, Any]] = {}
    for item in owned:
        for key, value in optimizer.state.get(item.leaf, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == item.leaf.shape and value.ndim:
                shards += [_renamed(shard, _key(item.name, key)) for shard in item.shards(value)]
            else:
                # A count of steps is on the GPU if the optimizer is fused: whoever reads it may have none.
                scalars.setdefault(item.name, {})[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    return shards, scalars


def _of_another_model(path: Path, outline: ModelOutline) -> Path | None:
    """Return where to keep a checkpoint that this model cannot load: its run's only one, which nobody gave up."""
    from ._reader import CheckpointReader  # lazy: it takes a second

    with suppress(CheckpointError):  # there is none, or a damaged one
        reader = CheckpointReader(path)
        if ".metadata" not in reader.manifest.files or reader.tensors(MODEL) != outline.tensors:
            return path.with_name(f"{path.name}.kept-{fresh_token()}")
    return None


def exists(path: Path, world: World) -> bool:
    """Return whether there is something to read: a checkpoint, or what is left of one; a collective operation.

    Raises:
        CheckpointError: A rank may not look, or a link leads nowhere: to begin anew would pass over what was saved.
    """
    found = False
    with alike(world):
        there = standing(absolute(path), is_whole)
        found = there.is_file() or (there.is_dir() and any(there.iterdir()))
        if path.is_symlink() and not there.exists():
            raise CheckpointError(
                f"{str(path)!r} is a link to {os.readlink(path)!r}, where there is nothing: mount or make that folder "
                "(an empty one begins anew), or remove the link"
            )
    return any(world.from_all(found))


def make_space(path: Path, new: Path) -> None:
    """Remove what a save that was killed has left, but not the only checkpoint that there is."""
    there = standing(path, is_whole)
    if there != path:
        there.rename(path)
    strange = path.exists() and not (path / MANIFEST).exists() and not (path / ".metadata").exists()
    if path.is_file() or (strange and any(path.iterdir())):
        raise CheckpointError("there is something else; give a folder that is new, empty or a checkpoint")
    for leftover in beside(path):
        shutil.rmtree(leftover, ignore_errors=True)  # a rank that has not died yet may write to it
    new.mkdir(parents=True)


def check_place(path: Path, world: World) -> None:
    """Make sure, before there is anything to lose, that a checkpoint can be written; a collective operation.

    Args:
        path: Where.
        world: All ranks.

    Raises:
        CheckpointError: Rank 0 may not write there, something else is there, or hosts do not share the folder.
    """
    with alike(world):
        path = absolute(path)
    new = fresh(path, world.from_root(fresh_token()))
    try:
        with locked(path, world):
            with alike(world):
                if world.rank == 0:
                    make_space(path, new)
            _check_shared(new, world)
    except CheckpointError as error:
        raise CheckpointError(f"no checkpoint could be written to {str(path)!r}: {error}") from None
    finally:
        if world.rank == 0:
            shutil.rmtree(new, ignore_errors=True)


def _check_shared(new: Path, world: World) -> None:
    with alike(world):
        if not new.is_dir():
            raise CheckpointError(f"{str(new.parent)!r} is not the folder that rank 0 has: all hosts must share one")


def read(
    path: Path,
    tensors: Iterable[TensorShard],
    owned: Iterable[Owned],
    optimizer: Any,
    outline: ModelOutline,
    world: World,
    *,
    weights_only: bool = True,
) -> tuple[dict[str, Any], Any]:
    """Read a checkpoint that was written under any plan into what this rank holds; a collective operation.

    Args:
        path: The directory.
        tensors: What this rank holds of parameters and buffers; overwritten.
        owned: What its optimizer updates.
        optimizer: The optimizer, which gets the state and the settings that were saved.
        outline: Of the whole model.
        world: All ranks.
        weights_only: Whether anything but plain values and tensors is refused; see `torch.load`.

    Returns:
        `about` and `extra`, as they were given to `write`.

    Raises:
        CheckpointError: There is none at `path`, it is damaged, or it is of another model or optimizer; names what
            differs. Nothing has been overwritten then.
    """
    from . import _dcp  # lazy: it takes a second
    from ._reader import CheckpointReader

    with alike(world):
        reader = CheckpointReader(path)
    if len(set(world.from_all(reader.manifest.checksum))) > 1:
        raise CheckpointError(f"ranks find different checkpoints at {str(path)!r}: all hosts must share one folder")
    with alike(world):
        reader.verify(world.rank, world.size)
    with alike(world):
        about = reader.load_object(ABOUT, weights_only=weights_only)
        extra = reader.load_object(EXTRA, weights_only=weights_only)
        said = f"the checkpoint at {str(path)!r}"
        found = reader.tensors(MODEL)
        missing, unexpected = outline.tensors.keys() - found.keys(), found.keys() - outline.tensors.keys()
        outline.check_keys(missing, unexpected, said, strict=True)
        outline.check(found, said, casts=False)
        _check_optimizer(about, optimizer, outline, said)
        for item in (owned := list(owned)):
            for key, value in about["optimizer_scalars"].get(item.name, {}).items():
                if _divides_not(value, item):
                    raise CheckpointError(f"{said} has a state {key!r} of {item.name!r}, which this plan cannot divide")
    shards = [_renamed(shard, MODEL + shard.name) for shard in tensors]
    saved: dict[str, dict[str, torch.dtype]] = {}
    for name, (_, dtype) in reader.tensors(OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        saved.setdefault(parameter, {})[key] = dtype
    states: dict[int, dict[str, Any]] = {}
    for item in owned:
        for key, dtype in saved.get(item.name, {}).items():
            value = torch.zeros_like(item.leaf.detach(), dtype=dtype)
            states.setdefault(id(item.leaf), {})[key] = value
            shards += [_renamed(shard, _key(item.name, key)) for shard in item.shards(value)]
    try:
        _dcp.load(reader, shards, world)
    except CheckpointError as error:  # a disk that fails, or a program that has saved there since
        raise CheckpointError(
            f"{said} was lost while it was read, and the weights are partly overwritten: {error}"
        ) from None
    _set_state(optimizer, owned, about, states)
    set_random_state(about["random"][world.rank % len(about["random"])])
    loaded(path, optimizer)
    return about, extra


def _set_state(
    optimizer: Any, owned: Iterable[Owned], about: dict[str, Any], moments: dict[int, dict[str, Any]]
) -> None:
    """Give an optimizer its settings and state: `about` has what is no tensor of a parameter's shape."""
    optimizer.state.clear()
    for group, settings in zip(optimizer.param_groups, about["groups"], strict=True):
        group.update(settings)
    on_device = {
        id(p)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for p in group["params"]
    }
    for item in owned:
        state = {**about["optimizer_scalars"].get(item.name, {}), **moments.get(id(item.leaf), {})}
        if state:
            fitted = {key: _fitted(value, item) for key, value in state.items()}
            if id(item.leaf) in on_device:  # where such an optimizer wants its counts of steps, too
                fitted = {k: v.to(item.leaf.device) if isinstance(v, torch.Tensor) else v for k, v in fitted.items()}
            optimizer.state[item.leaf] = fitted


def _check_is_kept(optimizer: Any, owned: Iterable[Owned]) -> None:
    """Refuse an optimizer that has other state than what is kept: settings of its groups, and values by parameter."""
    kind, why = type(optimizer).__name__, ""
    state = optimizer.state_dict() if hasattr(optimizer, "state_dict") else {}
    if more := [str(key) for key in state if key not in ("state", "param_groups", PART)]:
        why = f"its state dict has {', '.join(more[:3])} besides the state by parameter"
    elif more := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        why = f"it has state that is of no parameter ({more[0]!r})"
    for item in owned:
        for key, value in optimizer.state.get(item.leaf, {}).items():
            if _divides_not(value, item):
                why = why or f"its state {key!r} of {item.name!r}, of which a rank has a part, cannot be joined"
    if why:
        raise CheckpointError(
            f"{kind} keeps what a checkpoint does not: {why}. Keep it by torch.save(optimizer.state_dict()), under a "
            "plan that divides nothing, beside trainer.state_dict()"
        )


def _divides_not(value: Any, item: Owned) -> bool:
    """Return whether a state of a part of a parameter has values that are neither of its elements nor of all alike."""
    if item.leaf.numel() == math.prod(item.where.place.shape):
        return False
    if isinstance(value, torch.Tensor) and value.shape == item.leaf.shape:
        return False
    return any(tensor.numel() > 1 for tensor in tensors_in(value))


def _check_optimizer(about: dict[str, Any], optimizer: Any, outline: ModelOutline, said: str) -> None:
    kind, groups, saved = type(optimizer).__name__, outline.groups, [tuple(names) for names in about["members"]]
    why = ""
    if about["optimizer"] != kind:
        why = f"it has the state of {about['optimizer']}, and the optimizer is {kind}"
    elif len(saved) != len(groups):
        why = f"its optimizer had {len(saved)} parameter groups, and this one has {len(groups)}"
    else:
        for number, (here, there) in enumerate(zip(groups, saved, strict=True)):
            if differing := sorted(set(here) ^ set(there)):
                one, other = ("here", "there") if differing[0] in here else ("there", "here")
                why = f"{differing[0]!r} is in parameter group {number} of the optimizer {one} and not {other}"
                break
    if why:
        raise CheckpointError(f"{said} is of another optimizer: {why}. load_state_dict takes its weights alone")


def _fitted(value: Any, item: Owned) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Of a parameter without dimensions nothing tells a moment from a count of steps, and its shard may have one.
    return value.clone() if item.where.place.shape else value.clone().reshape(item.leaf.shape)


def _renamed(shard: TensorShard, name: str) -> TensorShard:
    return TensorShard(name, shard.shape, shard.offsets, shard.tensor)


def _key(name: str, key: str) -> str:
    return f"{OPTIMIZER}{name}/{key}"


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def random_state() -> dict[str, Any]:
    """Return the states of the global random generators of this process."""
    states = RngStates.now()
    cuda = torch.cuda.get_rng_state() if _uses_cuda() else None
    return {"torch": states.torch_state, "python": states.python_state, "numpy": states.numpy_state, "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Put them back."""
    RngStates(state["torch"], state["python"], state["numpy"]).install()
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def _pickled(value: Any, what: str) -> io.BytesIO:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise CheckpointError(f"{what} cannot be pickled: {error!r}") from None
    return stream


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
