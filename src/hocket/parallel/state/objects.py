"""Checkpoints of programs with a loop of their own: the states of their objects in one file, whole and verified."""

import shutil
from pathlib import Path
from typing import Any

import torch

from ..mesh import World
from ._lock import locked
from ._manifest import CheckpointError, CountedStream, Manifest, alike, safe_load
from ._replace import fresh, fresh_token, replace, sync
from .checkpoint import check_place, make_space, random_state, set_random_state

_FILE = "objects.pt"


def write_objects(path: Path, state: dict[str, Any], world: World) -> None:
    """Write what rank 0 gives, and every rank's random state; a collective operation.

    `path` is a directory; what was there is replaced when all of this one is on the disk. `state` is anything
    picklable.

    Raises:
        CheckpointError: It cannot be written; what was at `path` before is still there.
    """
    check_place(path, world)
    states = world.from_all(random_state())
    with locked(path, world), alike(world):
        if world.rank == 0:
            path = path.resolve()
            new = fresh(path, fresh_token())
            make_space(path, new)
            stream = None
            try:
                with (new / _FILE).open("wb") as file:
                    stream = CountedStream(file)
                    torch.save({**state, "random": states}, stream)
                sync(new / _FILE)
                Manifest({_FILE: (stream.nbytes, stream.crc)}).write(new)
                replace(new, path)
            except Exception as error:
                shutil.rmtree(new, ignore_errors=True)
                why = error if stream is None or stream.error is None else stream.error  # torch.save tells of positions
                raise CheckpointError(f"the checkpoint {str(path)!r} cannot be written: {why}") from None


def read_objects(path: Path, world: World, *, weights_only: bool = True) -> dict[str, Any]:
    """Return what was written, on every rank, and put its random state back; a collective operation.

    With `weights_only` anything but plain values and tensors is refused; see `torch.load`.

    Raises:
        CheckpointError: It is damaged, is none of `write_objects`, differs among ranks, or would have to run code.
    """
    from ._reader import CheckpointReader  # lazy: it takes a second

    said, found = f"the checkpoint at {str(path)!r}", dict[str, Any]()
    with alike(world):
        reader = CheckpointReader(path)
        if _FILE not in reader.manifest.files:
            raise CheckpointError(f"{said} was written by Trainer.save, and is for Trainer.load")
        reader.verify()
    if len(set(world.from_all(reader.manifest.checksum))) > 1:
        raise CheckpointError(f"ranks find different checkpoints at {str(path)!r}: all hosts must share one folder")
    with alike(world):
        found.update(_loaded(reader.folder / _FILE, said, weights_only=weights_only))
    states = found.pop("random")
    set_random_state(states[world.rank % len(states)])
    return found


def _loaded(file: Path, said: str, *, weights_only: bool) -> Any:
    try:
        return safe_load(file, said)
    except CheckpointError as error:
        if weights_only:
            raise CheckpointError(f"{error}; if you trust who wrote it, say weights_only=False to resume") from None
    return torch.load(file, weights_only=False)
