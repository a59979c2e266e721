"""What a checkpoint consists of: a file that has the length and the checksum of every other, counted while written."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..batches import RngStates
from ..mesh import World
from ._replace import sync

MANIFEST = "manifest.json"
ABOUT, EXTRA = "about", "extra"  # of what DCP writes that which is no tensor: ours, and the user's
MODEL, OPTIMIZER = "model.", "optimizer."  # how tensors' names begin
VERSION = 2
"""Of the layout; checkpoints without a manifest were version 1."""
_SAFE: list[Any] = [
    RngStates,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in f"?{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}SU"),
    *(value.__reduce__()[0] for value in (np.empty(0), np.float64(0))),  # private functions that rebuild them
]
_PIECE_NBYTES = 2**20


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or is of another model; every rank raises the same."""


@contextmanager
def alike(world: World) -> Iterator[None]:
    """Open a block after which all ranks raise one CheckpointError if any has raised an error; a collective operation.

    No collective operation can stand in the block: a rank that fails does not come to it.
    """
    said, cause = None, None
    try:
        yield
    except (OSError, CheckpointError) as error:
        said = str(error)
    except Exception as error:
        said, cause = repr(error), error
    failed = {rank: text for rank, text in enumerate(world.from_all(said)) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise CheckpointError(text if rank == 0 else f"rank {rank}: {text}") from cause


def absolute(path: Path) -> Path:
    """Return the path without links; CheckpointError if nothing says where it is."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        if path.is_absolute() or not isinstance(error, FileNotFoundError):
            raise CheckpointError(f"{str(path)!r} leads nowhere: {error}") from None
        raise CheckpointError(
            f"{str(path)!r} is in the working directory, which was removed: give an absolute path"
        ) from None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a checkpoint."""

    files: Mapping[str, tuple[int, int]]  # of each file its length in bytes and its CRC-32

    @property
    def checksum(self) -> int:
        """Of the names, lengths and checksums: two checkpoints have the same only if they are the same."""
        return _checksum(self.files)

    def write(self, folder: Path) -> None:
        """Write it, on the disk when this returns: the folder is then a whole checkpoint."""
        content: dict[str, Any] = {"format": "hocket checkpoint", "version": VERSION, "files": self.files}
        path = folder / MANIFEST
        path.write_text(json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")
        sync(path)
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read that of a checkpoint; CheckpointError if there is none, or it is damaged, or of a newer version."""
        where = f"the checkpoint at {str(folder)!r}"
        try:
            text = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            if (folder / ".metadata").exists():
                raise CheckpointError(
                    f"{where} has no {MANIFEST}: a file is lost, or Trainer.save did not write it"
                ) from None
            raise CheckpointError(f"there is no checkpoint at {str(folder)!r}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        try:
            content = json.loads(text)
            checksum, version = content.pop("checksum"), content["version"]
            files = {name: (nbytes, crc) for name, (nbytes, crc) in content["files"].items()}
            damaged = checksum != _checksum(content)
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged = True
        if damaged:
            raise CheckpointError(f"{where} is damaged: {MANIFEST} is not what was written")
        if version > VERSION:
            raise CheckpointError(
                f"{where} is of version {version}, and this Hocket reads up to version {VERSION}: install a newer one"
            )
        return cls(files)

    def verify(self, folder: Path, number: int = 0, count: int = 1) -> None:
        """Compare every `count`th of the files, from `number` on, with what was written.

        CheckpointError names one that is missing or has changed.
        """
        for name in sorted(self.files)[number::count]:
            nbytes, crc = self.files[name]
            found = 0
            try:
                with (folder / name).open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size == nbytes:
                        while piece := file.read(_PIECE_NBYTES):
                            found = zlib.crc32(piece, found)
            except OSError as error:
                raise CheckpointError(f"the checkpoint at {str(folder)!r} is damaged: {error}") from None
            if size != nbytes or found != crc:
                how = f"has {size} bytes of {nbytes}" if size != nbytes else "has another checksum than was written"
                raise CheckpointError(f"the checkpoint at {str(folder)!r} is damaged: {name} {how}")


class CountedStream:
    """A file to be written from its beginning to its end: how long it is, its CRC-32, and what the disk refused."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.nbytes = self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write more."""
        self.crc = zlib.crc32(data, self.crc)
        try:
            written: int = self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self.nbytes += written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_whole(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint that was written to its end: the manifest is written last."""
    try:
        Manifest.read(folder)
    except (OSError, CheckpointError):
        return False
    return True


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def safe_load(file: Any, said: str) -> Any:
    """Return what a file of torch.save holds, where that is plain values, tensors and arrays.

    Raises:
        CheckpointError: It is more, whose unpickling can run code.
    """
    try:
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{said} has objects whose unpickling can run code ({unsafe_name(error)})") from None


def unsafe_name(error: pickle.UnpicklingError) -> str:
    """Return of what class or function objects are that `torch.load` has refused; torch says much besides."""
    text = str(error)
    name = re.search(r"GLOBAL ([\w.]+)|got <class '([\w.]+)'>", text)
    return (name[1] or name[2]) if name else text.splitlines()[0].rstrip(".")
