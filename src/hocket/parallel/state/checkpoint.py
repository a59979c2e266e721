"""Checkpoints that know nothing of the plan they were written under: torch's DCP files, under the model's own names."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..batches import RngStates
from ..mesh import World
from ._owned import Owned
from ._shards import TensorShard

_ABOUT = "about"  # what is no tensor of the model's shapes
_MODEL, _OPTIMIZER = "model.", "optimizer."


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is of another model."""


class DcpShards:
    """The boxes of one tensor that this rank holds, as DCP wants to be told of them.

    Args:
        shards: Shards of one tensor; at least one.
    """

    def __init__(self, shards: list[TensorShard]) -> None:
        self._shards = {torch.Size(shard.offsets): shard for shard in shards}
        self._shape = torch.Size(shards[0].shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=self._shape,
                ),
            )
            for offsets, shard in self._shards.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(shard) for shard in self._shards.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._shards[index.offset].tensor

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._shape


def _chunk(shard: TensorShard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(shard.offsets), sizes=shard.tensor.shape)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return (
            found.__get_tensor_shard__(index).detach() if isinstance(found, DcpShards) else super().lookup_object(index)
        )


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        # The default walks through values for tensors on the meta device, and knows no others than its own kinds.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return (
            found.__get_tensor_shard__(index).detach() if isinstance(found, DcpShards) else super().lookup_tensor(index)
        )


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
    entries: dict[str, Any] = _by_name(shards)
    if world.rank == 0:
        entries[_ABOUT] = about
    new, old = (path.with_name(path.name + end) for end in (".new", ".old"))
    if world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
    world.from_root(None)
    # Looking for sharded tensors to flatten, DCP would drop empty dicts.
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone():
        state_dict_saver.save(entries, checkpoint_id=str(new), planner=planner, no_dist=world.size == 1)
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
    try:
        metadata = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, EOFError) as error:
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}: {error}") from None
    owned = list(owned)
    shards = [_renamed(shard, _MODEL + shard.name) for shard in tensors]
    _check(path, shards, metadata)
    states: dict[int, dict[str, Any]] = {}
    for item in owned:
        prefix = _key(item.name, "")
        for name, saved in metadata.items():
            if name.startswith(prefix) and isinstance(saved, TensorMetadata):
                value = torch.zeros_like(item.leaf.detach(), dtype=saved.properties.dtype)
                states.setdefault(id(item.leaf), {})[name[len(prefix) :]] = value
                shards += [_renamed(shard, name) for shard in item.shards(value)]
    entries: dict[str, Any] = {**_by_name(shards), _ABOUT: None}
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone():
        state_dict_loader.load(entries, checkpoint_id=str(path), planner=planner, no_dist=world.size == 1)
    about: dict[str, Any] = entries[_ABOUT]
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
        if not isinstance(found, TensorMetadata):
            raise CheckpointError(f"the checkpoint at {str(path)!r} has no {name!r}: it is of another model")
        if tuple(found.size) != tuple(shard.shape):
            raise CheckpointError(
                f"{name!r} has the shape {list(shard.shape)} here and {list(found.size)} in the checkpoint at "
                f"{str(path)!r}: it is of another model"
            )


def _by_name(shards: list[TensorShard]) -> dict[str, DcpShards]:
    found: dict[str, list[TensorShard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return {name: DcpShards(same) for name, same in found.items()}


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


@contextmanager
def _alone() -> Iterator[None]:
    """Open a block in which DCP does not warn that one process is a world too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
