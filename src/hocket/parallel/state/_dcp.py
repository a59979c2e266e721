"""Shards in torch's DCP files: the only module that loads `torch.distributed.checkpoint`, seconds of imports."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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

from ..mesh import World
from ._shards import TensorShard


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


def saved_tensors(path: Path) -> dict[str, TensorMetadata]:
    """Return the description of every tensor in a checkpoint, by name.

    Raises:
        OSError, EOFError: there is none at `path`.
    """
    entries = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorMetadata)}


def save(path: Path, shards: list[TensorShard], others: dict[str, Any], world: World) -> None:
    """Write this rank's shards, and values that are no tensors of the model's; a collective operation."""
    # Looking for sharded tensors to flatten, DCP would drop empty dicts.
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    entries = {**_by_name(shards), **others}
    with _alone():
        state_dict_saver.save(entries, checkpoint_id=str(path), planner=planner, no_dist=world.size == 1)


def load(path: Path, shards: list[TensorShard], name: str, world: World) -> Any:
    """Read into this rank's shards, and return the value that is saved under `name`; a collective operation."""
    entries: dict[str, Any] = {**_by_name(shards), name: None}
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone():
        state_dict_loader.load(entries, checkpoint_id=str(path), planner=planner, no_dist=world.size == 1)
    return entries[name]


def _by_name(shards: list[TensorShard]) -> dict[str, DcpShards]:
    found: dict[str, list[TensorShard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return {name: DcpShards(same) for name, same in found.items()}


@contextmanager
def _alone() -> Iterator[None]:
    """Open a block in which DCP does not warn that one process is a world too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
