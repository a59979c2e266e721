"""Reads a checkpoint's files, which no pickle in them can make run code unless the user's own objects are asked for."""

from __future__ import annotations

import io
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, EnumType
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ._manifest import CheckpointError, Manifest, absolute, is_whole, safe_load
from ._replace import standing
from ._shards import Shape

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13's name for it, which others do not have
}


class CheckpointReader(FileSystemReader):
    """The files of a checkpoint.

    Args:
        path: Its directory, or where it is about to be put.

    Raises:
        CheckpointError: There is none, or its list of files is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._said = f"the checkpoint at {str(path)!r}"
        path = standing(absolute(path), is_whole)
        self._path = self.folder = path
        with suppress(OSError):  # of what is not there, the manifest is missed
            # Held open, it stays this one when a program that saves there meanwhile exchanges the two.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, descriptor)
            self.folder = Path(f"/proc/self/fd/{descriptor}")
        super().__init__(self.folder)
        with self._named():
            self.manifest = Manifest.read(self.folder)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Open a block whose errors have the path that people know."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(self.folder), str(self._path))) from None

    def verify(self, number: int = 0, count: int = 1) -> None:
        """See `Manifest.verify`."""
        with self._named():
            self.manifest.verify(self.folder, number, count)

    @cached_property
    def metadata(self) -> Metadata:
        """Return what DCP has written of tensors and where they lie; CheckpointError if it is something else."""
        try:
            with (self.folder / ".metadata").open("rb") as file:
                found = _MetadataUnpickler(file).load()
        except FileNotFoundError:
            if ".metadata" not in self.manifest.files:
                raise CheckpointError(
                    f"{self._said} was written by hocket.resume, or resume of a Keras model, and is for that alone"
                ) from None
            raise self._lost() from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"{self._said} has a .metadata that cannot be read: {error}; if a later torch than {torch.__version__} "
                "wrote it, read it with that one"
            ) from None
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{self._said} has a .metadata that is none")
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def tensors(self, prefix: str) -> dict[str, tuple[Shape, torch.dtype]]:
        """Return shape and type of each tensor whose name begins so, by the rest of its name."""
        return {
            name.removeprefix(prefix): (tuple(found.size), found.properties.dtype)
            for name, found in self.metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(found, TensorStorageMetadata)
        }

    def tensor(self, name: str) -> torch.Tensor:
        found = self.metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        whole = torch.empty(found.size, dtype=found.properties.dtype)
        for chunk in found.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = torch.load(self._entry(MetadataIndex(name, chunk.offsets)), weights_only=True)
        return whole

    def load_object(self, name: str, *, weights_only: bool) -> Any:
        """Return what is no tensor, without running code; what would have to run some is refused if `weights_only`.

        Raises:
            CheckpointError: It cannot be unpickled, or is refused.
        """
        stream = self._entry(MetadataIndex(name))
        try:
            return safe_load(stream, f"{self._said}: {name!r}")
        except CheckpointError as error:
            if weights_only:
                raise CheckpointError(
                    f"{error}; if you trust who wrote it, say weights_only=False to Trainer.load, "
                    "Trainer.resume or hocket.read_state_dict"
                ) from None
        stream.seek(0)
        try:
            return torch.load(stream, weights_only=False)
        except Exception as error:
            raise CheckpointError(f"{self._said}: {name!r} cannot be unpickled: {error!r}") from None

    def _entry(self, index: MetadataIndex) -> io.BytesIO:
        try:
            where = self.metadata.storage_data[index]
        except KeyError:
            raise CheckpointError(f"{self._said} has no {index.fqn!r}") from None
        try:
            with (self.folder / where.relative_path).open("rb") as file:
                file.seek(where.offset)
                return io.BytesIO(file.read(where.length))
        except FileNotFoundError:
            raise self._lost() from None

    def _lost(self) -> CheckpointError:
        return CheckpointError(f"{self._said} was replaced or removed while it was read: read it again")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes of a pickle what DCP's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that is allowed."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if is_type or (module == _METADATA and "." not in name) or (module, name) in _NAMES:
            return super().find_class(module.removesuffix("._local"), name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def _member(kind: Any, name: str) -> Enum:
    """Stand for getattr, by which early Pythons 3.11 (Debian 12 has 3.11.2) pickle members of an enumeration."""
    if not isinstance(kind, EnumType):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} does not belong there")
    return kind[name]
