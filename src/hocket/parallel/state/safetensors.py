"""Files of safetensors, and folders of them as Hugging Face has them: written and read one tensor at a time.

The format (https://github.com/huggingface/safetensors): 8 bytes that say how long the header is, the header in JSON
with type, shape and place of each tensor, and the tensors' bytes. The package of that name writes whole files at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ._manifest import CheckpointError
from ._replace import sync
from ._shards import Shape

_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_LARGEST_HEADER_NBYTES = 100_000_000  # as the package has it
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Table = Mapping[str, tuple[Shape, torch.dtype]]


class SafetensorsFolder:
    """A folder that is being written: one file, or several with an index; no reader takes it for whole before `finish`.

    Args:
        folder: Where; files of a model that is there already are replaced by `finish`.
        tensors: Shape and type of each tensor.
        tied: Of each name that is left out, since another in `tensors` has the same values, that other name.
        max_shard_nbytes: How large a file may be, if it has more than one tensor.

    Raises:
        CheckpointError: The format has no name for a type.
    """

    def __init__(self, folder: Path, tensors: Table, tied: Mapping[str, str], max_shard_nbytes: int) -> None:
        self.folder, self._tensors = folder, tensors
        for name, (_, dtype) in tensors.items():
            if dtype not in _NAMES:
                raise CheckpointError(f"{name!r} is {dtype}, which safetensors cannot hold")
        shards: list[list[str]] = [[]]
        nbytes = 0
        for name in tensors:
            size = self._nbytes(name)
            if shards[-1] and nbytes + size > max_shard_nbytes:
                shards.append([])
                nbytes = 0
            shards[-1].append(name)
            nbytes += size
        for shard in shards:  # large elements first, so that each is aligned
            shard.sort(key=lambda name: -tensors[name][1].itemsize)
        count = len(shards)
        self.names = (  # of the files
            [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        )
        self._shards = dict(zip(self.names, shards, strict=True))
        self._metadata = {"format": "pt", **tied}  # as safetensors.torch.save_model says it
        self._first = {shard[0]: file for file, shard in self._shards.items() if shard}
        self._file: Any = None
        self.order = [name for shard in shards for name in shard]  # in which `add` wants the tensors

    def _nbytes(self, name: str) -> int:
        shape, dtype = self._tensors[name]
        return math.prod(shape) * dtype.itemsize

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, which is on the CPU."""
        if name in self._first:
            self._open(self._first[name])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def _open(self, file: str) -> None:
        self._close()
        header: dict[str, Any] = {"__metadata__": self._metadata}
        end = 0
        for name in self._shards[file]:
            shape, dtype = self._tensors[name]
            begin, end = end, end + self._nbytes(name)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"{file}.new").open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Remove what has been written."""
        for file in self._shards:
            (self.folder / f"{file}.new").unlink(missing_ok=True)

    def finish(self) -> None:
        """Put the files in their places: the index goes first of the old ones, and comes last of the new ones."""
        if not self.order:
            self._open(SINGLE)
        self._close()
        keep = set(self._shards)
        (self.folder / INDEX).unlink(missing_ok=True)
        for old in (*self.folder.glob("model-*-of-*.safetensors"), self.folder / SINGLE):
            if old.name not in keep:
                old.unlink(missing_ok=True)
        for file in self._shards:
            (self.folder / f"{file}.new").rename(self.folder / file)
        if len(self._shards) > 1:
            total = sum(map(self._nbytes, self.order))
            places = {name: file for file, shard in self._shards.items() for name in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            new = self.folder / f"{INDEX}.new"
            new.write_text(json.dumps(index, indent=2) + "\n")
            sync(new)
            new.rename(self.folder / INDEX)
        sync(self.folder)


class SafetensorsReader:
    """The tensors of one file, of a folder with one, or of a folder with several and an index.

    Raises:
        CheckpointError: A file is not of the format, cut, or not what the index says.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, tuple[Shape, torch.dtype]] = {}  # shape and type of each
        self.tied: dict[str, str] = {}  # of names that are left out, the names that have their values
        self._places: dict[str, tuple[Path, int, int]] = {}
        if not path.is_dir():
            self._read_header(path)
        elif (path / INDEX).exists():
            self._read_index(path / INDEX)
        elif len(found := sorted(path.glob("*.safetensors"))) == 1:
            self._read_header(found[0])
        else:
            raise CheckpointError(f"{str(path)!r} has {len(found)} files of safetensors and no {INDEX}")

    def _read_index(self, path: Path) -> None:
        try:
            places: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
            for file in sorted(set(places.values())):
                self._read_header(path.parent / file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise (
                error if isinstance(error, CheckpointError) else CheckpointError(f"{str(path)!r}: {error!r}")
            ) from None
        for name, file in places.items():
            if self._places.get(name, (None,))[0] != path.parent / file:
                raise CheckpointError(f"{str(path)!r} says that {name!r} is in {file}, and it is not")

    def _read_header(self, path: Path) -> None:
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > min(_LARGEST_HEADER_NBYTES, size - 8):
                    raise ValueError("its header is longer than itself")
                header: dict[str, Any] = json.loads(file.read(length))
            self.tied |= {k: v for k, v in header.pop("__metadata__", {}).items() if k != "format"}
            end = 0
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                shape, dtype = tuple(entry["shape"]), _TYPES[entry["dtype"]]
                begin, until = entry["data_offsets"]
                if begin != end or until - begin != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name!r} does not lie where its shape and type put it")
                self.tensors[name] = shape, dtype
                self._places[name] = path, 8 + length + begin, until - begin
                end = until
            if 8 + length + end != size:
                raise ValueError(f"it has {size} bytes, and its header speaks of {8 + length + end}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{str(path)!r} is no file of safetensors, or damaged: {error}") from None

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        path, begin, nbytes = self._places[name]
        shape, dtype = self.tensors[name]
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        with path.open("rb") as file:
            file.seek(begin)
            content = bytearray(nbytes)
            if file.readinto(content) != nbytes:
                raise CheckpointError(f"{str(path)!r} has become shorter")
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)
