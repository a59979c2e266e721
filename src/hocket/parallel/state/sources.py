"""Where weights may come from: a state dict, a checkpoint, files of safetensors or of `torch.save`."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..mesh import World
from ._manifest import ABOUT, MANIFEST, MODEL, CheckpointError, alike, unsafe_name
from ._replace import beside
from ._shards import Shape, TensorShard
from .safetensors import SafetensorsFolder, SafetensorsReader
from .whole import EXTRA_STATE, ModelOutline, gathered, hand_out


class WeightSource(Protocol):
    """Tensors by the keys of a state dict, one at a time."""

    tensors: dict[str, tuple[Shape, torch.dtype]]  # shape and type of each
    tied: dict[str, str]  # of keys that are left out, the keys that have their values

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` has left as it was, and what it was given for nothing; as torch has them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _StateDict:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self.tied: dict[str, str] = {}
        plain = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.layout is torch.strided}
        weights = {k: v for k, v in plain.items() if not k.endswith(EXTRA_STATE)}
        self.tensors = {k: (tuple(v.shape), v.dtype) for k, v in weights.items()}
        self.others = {k: v for k, v in state.items() if k not in self.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._state[name].detach()
        return found


class _Checkpoint:
    """The weights of a checkpoint; all its files are compared with their checksums first."""

    def __init__(self, path: Path, *, weights_only: bool) -> None:
        from ._reader import CheckpointReader  # lazy: it takes a second

        self._reader = CheckpointReader(path)
        self._reader.verify()
        about = self._reader.load_object(ABOUT, weights_only=weights_only)
        self.others, self._names, found = about["computed"], about["keys"], self._reader.tensors(MODEL)
        first = {name: key for key, name in reversed(self._names.items())}
        self.tensors = {key: found[name] for name, key in first.items() if name in found}
        self.tied = {key: first[name] for key, name in self._names.items() if first[name] != key}

    def tensor(self, name: str) -> torch.Tensor:
        return self._reader.tensor(MODEL + self._names[name])


def open_weights(source: Mapping[str, Any] | str | Path, *, weights_only: bool = True) -> WeightSource:
    """Open a state dict, or the path of a checkpoint, of safetensors (a file or a folder) or of a file of `torch.save`.

    CheckpointError: there is none, or it is damaged.
    """
    if isinstance(source, Mapping):
        return _StateDict(source)
    path = Path(source)
    if not path.exists() and not beside(path):
        raise CheckpointError(f"there is nothing at {str(path)!r}")
    if not path.exists() or (path / MANIFEST).exists() or (path / ".metadata").exists():
        return _Checkpoint(path, weights_only=weights_only)
    if path.is_dir() or path.suffix == ".safetensors":
        return SafetensorsReader(path)
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{str(path)!r} is no file of tensors: {_why_not(path, error)}") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{str(path)!r} holds a {type(found).__name__} and no state dict")
    return _StateDict(found)


def _why_not(path: Path, error: Exception) -> str:
    """Return why torch cannot load tensors of a file; what it advises is of other callers."""
    if not zipfile.is_zipfile(path):
        return "it is cut off, or not written by torch.save, or in its format before torch 1.6 (load and save it again)"
    if isinstance(error, pickle.UnpicklingError):
        return (
            f"it has objects whose unpickling can run code ({unsafe_name(error)}); save a state dict of tensors, as "
            "model.state_dict()"
        )
    return str(error).splitlines()[0]


def read_state_dict(path: str | Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the weights of a checkpoint, or of files of safetensors, for `load_state_dict` of the plain model.

    It takes one process and no Trainer. Keys that are tied share one tensor.

    Args:
        path: What `Trainer.save` or `Trainer.save_model` was given, or a file of safetensors or of `torch.save`.
        weights_only: Whether what is more than plain values and tensors is refused, since unpickling it can run code.

    Raises:
        CheckpointError: There is none, it is damaged, or refused.
    """
    source = open_weights(path, weights_only=weights_only)
    found: dict[str, Any] = {key: source.tensor(key) for key in source.tensors}
    found |= {key: found[other] for key, other in source.tied.items() if other in found}
    return found | getattr(source, "others", {})


def load_weights(
    given: Mapping[str, Any] | str | Path,
    shards: Sequence[TensorShard],
    outline: ModelOutline,
    world: World,
    *,
    strict: bool,
    convert: Callable[[Path], Mapping[str, Any] | None] = lambda _: None,
) -> tuple[IncompatibleKeys, dict[str, Any]]:
    """Overwrite what every rank holds of a model's weights; a collective operation. Rank 0's source counts.

    `shards` are what this rank holds; `strict` says whether keys must be those of the model, and `convert` gives rank 0
    the state dict of a folder whose keys are not, or None.

    Returns:
        What was not loaded, and what else than tensors was given.

    Raises:
        CheckpointError: Keys, shapes or types are not those of the model, or the source is damaged; nothing has been
            overwritten.
    """
    source: Any = None
    table: Any = None
    said = "the state dict" if isinstance(given, Mapping) else repr(str(given))
    with alike(world):
        if world.rank == 0:
            source = open_weights(given)
            if isinstance(source, SafetensorsReader) and not outline.is_told_by({*source.tensors, *source.tied}):
                source = _StateDict(found) if (found := convert(Path(str(given)))) else source
            table = source.tensors, source.tied, getattr(source, "others", None), said
    tensors, tied, others, said = world.from_root(table)
    left_out = [] if others is None else [key for key in outline.computed if key not in others]
    others = others or {}
    keys = {key: key for key in tensors} | {key: other for key, other in tied.items() if other in tensors}
    givers: dict[str, list[str]] = {}  # by the model's name, the keys that the source has for it
    for key, other in keys.items():
        if key in outline.keys and other not in givers.setdefault(outline.keys[key], []):
            givers[outline.keys[key]].append(other)
    used = {other for found in givers.values() for other in found}
    computed = {key: value for key, value in others.items() if key in outline.computed}
    missing = [key for key, name in outline.keys.items() if name not in givers]
    missing += left_out  # but of files that cannot hold what is no tensor
    unexpected = [key for key in (*tensors, *others) if key not in used and key not in computed]
    with alike(world):
        outline.check_keys(missing, unexpected, said, strict=strict)
        outline.check({name: tensors[found[0]] for name, found in givers.items()}, said, casts=True)
        if world.rank == 0:
            _check_tied(source, givers)
    names = [name for name in outline.tensors if name in givers]
    hand_out(lambda name: source.tensor(givers[name][0]), shards, outline.tensors, names, world)
    return IncompatibleKeys(missing, unexpected), computed


def _check_tied(source: WeightSource, givers: Mapping[str, Sequence[str]]) -> None:
    for first, *others in givers.values():
        for other in others:
            if not torch.equal(source.tensor(first), source.tensor(other)):
                raise CheckpointError(
                    f"{first!r} and {other!r} are one tensor of the model, and differ in what is loaded"
                )


def export(
    folder: Path, outline: ModelOutline, shards: Sequence[TensorShard], world: World, *, max_shard_nbytes: int
) -> None:
    """Write a model's weights as safetensors, one tensor at a time; a collective operation, of which rank 0 writes.

    Args:
        folder: Where.
        outline: Of the model.
        shards: What this rank holds.
        world: All ranks.
        max_shard_nbytes: How large a file may be.

    Raises:
        CheckpointError: It cannot be written.
    """
    tied = {key: name for key, name in outline.keys.items() if key != name}
    with alike(world):
        told = {name: outline.tensors[name] for name in dict.fromkeys(outline.keys.values())}
        files = SafetensorsFolder(folder, told, tied, max_shard_nbytes)
    values = gathered(shards, outline.tensors, files.order, world, rank0_only=True)
    _write(files, values, world)


def _write(files: SafetensorsFolder, values: Iterable[tuple[str, torch.Tensor]], world: World) -> None:
    failure: Exception | None = None
    for name, tensor in values:  # to the end on every rank, whatever becomes of the files
        try:
            if world.rank == 0 and failure is None:
                files.add(name, tensor)
        except Exception as error:  # others wait
            failure = error
        del tensor  # a view of all that came with it
    with alike(world):
        if failure is not None:
            files.discard()
            raise CheckpointError(f"{str(files.folder)!r} cannot be written: {failure}") from failure
        if world.rank == 0:
            files.finish()


def verify_checkpoint(path: Path) -> Mapping[str, tuple[int, int]]:
    """Read all of a checkpoint, and return of each file the bytes and the CRC-32.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    from ._reader import CheckpointReader  # lazy: it takes a second

    reader = CheckpointReader(path)
    reader.verify()
    return reader.manifest.files


def export_checkpoint(path: str | Path, folder: str | Path, max_shard_nbytes: int) -> list[str]:
    """Write the weights of a checkpoint as safetensors, one tensor at a time, without a Trainer.

    Args:
        path: The checkpoint, or anything else that `open_weights` takes.
        folder: Where.
        max_shard_nbytes: How large a file may be.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: There is none, it is damaged, or the files cannot be written.
    """
    source = open_weights(path)
    files = SafetensorsFolder(Path(folder), source.tensors, source.tied, max_shard_nbytes)
    _write(files, ((name, source.tensor(name)) for name in files.order), World(0, 1, None))
    return files.names
