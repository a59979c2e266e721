"""Checkpoints that know nothing of the plan they were written under: torch's DCP files, under the model's own names."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..batches import States
from ..mesh import World
from ._owned import Owned
from ._pieces import Piece

_ABOUT = "about"  # what is no tensor of the model's shapes
_MODEL, _OPTIMIZER = "model.", "optimizer."


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is of another model."""


class Pieces:
    """The boxes of one tensor that this rank holds, as DCP wants to be told of them.

    Args:
        pieces: of one name; at least one.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = {torch.Size(piece.offsets): piece for piece in pieces}
        self._shape = torch.Size(pieces[0].shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=self._shape,
                ),
            )
            for offsets, piece in self._pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self._pieces.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._pieces[index.offset].tensor

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self._shape


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index).detach() if isinstance(found, Pieces) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        # The default walks through values for tensors on the meta device, and knows no others than its own kinds.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index).detach() if isinstance(found, Pieces) else super().lookup_tensor(index)


def write(
    path: Path, tensors: Iterable[Piece], owned: Iterable[Owned], optimizer: Any, about: dict[str, Any], world: World
) -> None:
    """Writes a checkpoint; a collective operation.

    Args:
        path: a directory; what was there is replaced when all has been written.
        tensors: what this rank holds of parameters and buffers.
        owned: what its optimizer updates.
        optimizer: the optimizer.
        about: all else that is to be kept, by name; rank 0's counts.
        world: all ranks.
    """
    owned = list(owned)
    pieces = [_renamed(piece, _MODEL + piece.name) for piece in tensors]
    scalars: dict[str, dict[str, Any]] = {}
    for item in owned:
        for key, value in optimizer.state.get(item.leaf, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == item.leaf.shape and value.ndim:
                pieces += [_renamed(piece, _key(item.name, key)) for piece in item.pieces(value)]
            else:
                scalars.setdefault(item.name, {})[key] = value
    everywhere: dict[str, dict[str, Any]] = {}
    states = []
    for mine, state in world.from_all((scalars, _random_state())):
        everywhere.update(mine)
        states.append(state)
    about = {**about, "optimizer_scalars": everywhere, "random": states, "groups": _settings(optimizer)}
    entries: dict[str, Any] = _by_name(pieces)
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


def read(path: Path, tensors: Iterable[Piece], owned: Iterable[Owned], optimizer: Any, world: World) -> dict[str, Any]:
    """Reads a checkpoint that was written under any plan into what this rank holds; a collective operation.

    Args:
        path: the directory.
        tensors: what this rank holds of parameters and buffers; overwritten.
        owned: what its optimizer updates.
        optimizer: gets the state and the settings that were saved.
        world: all ranks.

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
    pieces = [_renamed(piece, _MODEL + piece.name) for piece in tensors]
    _check(path, pieces, metadata)
    states: dict[int, dict[str, Any]] = {}
    for item in owned:
        prefix = _key(item.name, "")
        for name, saved in metadata.items():
            if name.startswith(prefix) and isinstance(saved, TensorMetadata):
                value = torch.zeros_like(item.leaf.detach(), dtype=saved.properties.dtype)
                states.setdefault(id(item.leaf), {})[name[len(prefix) :]] = value
                pieces += [_renamed(piece, name) for piece in item.pieces(value)]
    entries: dict[str, Any] = {**_by_name(pieces), _ABOUT: None}
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


def _check(path: Path, pieces: list[Piece], metadata: dict[str, Any]) -> None:
    for piece in pieces:
        found = metadata.get(piece.name)
        name = piece.name.removeprefix(_MODEL)
        if not isinstance(found, TensorMetadata):
            raise CheckpointError(f"the checkpoint at {str(path)!r} has no {name!r}: it is of another model")
        if tuple(found.size) != tuple(piece.shape):
            raise CheckpointError(
                f"{name!r} has the shape {list(piece.shape)} here and {list(found.size)} in the checkpoint at "
                f"{str(path)!r}: it is of another model"
            )


def _by_name(pieces: list[Piece]) -> dict[str, Pieces]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return {name: Pieces(same) for name, same in found.items()}


def _renamed(piece: Piece, name: str) -> Piece:
    return Piece(name, piece.shape, piece.offsets, piece.tensor)


def _key(name: str, key: str) -> str:
    return f"{_OPTIMIZER}{name}/{key}"


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _random_state() -> dict[str, Any]:
    states = States.now()
    cuda = torch.cuda.get_rng_state() if _uses_cuda() else None
    return {"torch": states.torch_state, "python": states.python_state, "numpy": states.numpy_state, "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    generator = getattr(np.random, state["numpy"]["bit_generator"])()
    generator.state = state["numpy"]
    numpy_random: Any = np.random
    numpy_random.set_bit_generator(generator)
    if state["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def _alone() -> Iterator[None]:
    """A block in which DCP does not warn that one process is a world too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
