"""Shards in torch's DCP files. It loads `torch.distributed.checkpoint`, as `_reader` does: seconds of imports."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..mesh import World
from ._manifest import CheckpointError, CountedStream
from ._shards import TensorShard


class DcpShards:
    """The boxes of one tensor that this rank holds, as DCP wants to be told of them."""

    def __init__(self, shards: list[TensorShard]) -> None:
        self._shards = {torch.Size(shard.offsets): shard for shard in shards}
        self._shape = torch.Size(shards[0].shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(shard), properties=TensorProperties.create_from_tensor(shard.tensor), size=self._shape
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

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object  # tensors as they are, and all else has been pickled


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


def save(
    folder: Path, shards: list[TensorShard], others: dict[str, io.BytesIO], world: World
) -> dict[str, tuple[int, int]]:
    """Write this rank's shards, and what is pickled; return its files' bytes and CRC-32; a collective operation."""
    writer = FileSystemWriter(folder)
    writer.fs = files = _CountedFiles()
    # Looking for sharded tensors to flatten, DCP would drop empty dicts.
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    entries = {**_by_name(shards), **others}
    with _our_errors():
        state_dict_saver.save(entries, storage_writer=writer, planner=planner, no_dist=world.size == 1)
    return files.written


def load(reader: FileSystemReader, shards: list[TensorShard], world: World) -> None:
    """Read into this rank's shards; a collective operation."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _our_errors():
        state_dict_loader.load({**_by_name(shards)}, storage_reader=reader, planner=planner, no_dist=world.size == 1)


def _by_name(shards: list[TensorShard]) -> dict[str, DcpShards]:
    found: dict[str, list[TensorShard]] = {}
    for shard in shards:
        found.setdefault(shard.name, []).append(shard)
    return {name: DcpShards(same) for name, same in found.items()}


@contextmanager
def _our_errors() -> Iterator[None]:
    """Open a block for a call of DCP: its errors are ours, and it does not warn that one process is a world too."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank}: {cause}") from None


class _CountedFiles(FileSystem):
    """DCP's files on a disk, with the length and checksum of each that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[int, int]] = {}  # by name, bytes and CRC-32

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            counted = CountedStream(stream)
            try:
                yield counted
            except Exception:
                if counted.error is not None:  # torch.save tells of positions in the file instead
                    raise counted.error from None
                raise
        self.written[Path(path).name] = counted.nbytes, counted.crc

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)
