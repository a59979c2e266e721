"""What a fabric that is up has written down: one small file in the temporary directory, one socket beside it.

The file says which process keeps the fabric (with its start, so that a later process of the same number is not taken
for it), who owns it, and what is wired.
"""

import contextlib
import json
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hocket._sweep import start_ticks

from ._errors import FabricError, FabricInputError
from ._wiring import Wiring

_PREFIX = "hocket-fabric-"
_NAME = re.compile(r"[A-Za-z0-9_.]{1,40}")


@dataclass(frozen=True, slots=True)
class FabricState:
    """A fabric as its file describes it.

    Attributes:
        name: Name of the fabric.
        file: File that this was read from.
        keeper: The process that holds the namespaces.
        keeper_start: When it started, in clock ticks after boot.
        owner: The process with which the fabric ends; None if it stays up until it is taken down.
        user_namespace: Path of the user namespace to enter first; None if the fabric needs none.
        namespaces: Path of every node's network namespace.
        numbers: Number of every node's network namespace.
        wiring: What is built.
    """

    name: str
    file: str
    keeper: int
    keeper_start: int
    owner: int | None
    user_namespace: str | None
    namespaces: tuple[str, ...]
    numbers: tuple[int, ...]
    wiring: Wiring

    @property
    def alive(self) -> bool:
        """Whether its keeper still runs."""
        return start_ticks(self.keeper) == self.keeper_start

    @property
    def socket(self) -> str:
        """Where the keeper answers."""
        return socket_of(self.file)


def directory() -> Path:
    """Return where the files are."""
    return Path(tempfile.gettempdir())


def path_of(name: str) -> Path:
    """Return the file of a fabric. Raises FabricInputError: the name cannot be one."""
    if not _NAME.fullmatch(name):
        raise FabricInputError(
            f"{name!r} cannot be the name of a fabric; take 1 to 40 letters, digits, dots, underscores"
        )
    # Not by user: whoever runs in a host of a user's own namespaces is user 0 there.
    return directory() / f"{_PREFIX}{name}.json"


def socket_of(file: str) -> str:
    return file.removesuffix(".json") + ".sock"


def read(file: str | Path) -> FabricState | None:
    """Return what a file says; None if it has gone, or is another user's, or no file: anybody may write beside it.

    Raises:
        FabricError: The file is this user's own, and broken.
    """
    try:
        # What others can put there neither leads us elsewhere nor lets us wait.
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
                return None
            value = json.load(opened)
        wiring = Wiring.from_json(value.pop("wiring"))
        return FabricState(
            **{**value, "namespaces": tuple(value["namespaces"]), "numbers": tuple(value["numbers"])},
            file=str(file),
            wiring=wiring,
        )
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise FabricError(f"{file} is not a fabric's file ({error}); remove it") from None


def fabrics() -> list[FabricState]:
    """Return the fabrics of this user, also those whose keeper has gone, by name; broken files are left out."""
    found = []
    for path in sorted(directory().glob(f"{_PREFIX}*.json")):
        with contextlib.suppress(FabricError):
            if (state := read(path)) is not None:
                found.append(state)
    return found
