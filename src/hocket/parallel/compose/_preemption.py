"""A job that is told to end (time limit, preemption) saves a checkpoint first, after the same step on all ranks."""

import contextlib
import gc
import hashlib
import os
import pickle
import reprlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

from hocket._program import warn

from ..batches import SharedLoader
from ..mesh import World
from ..state import CheckpointError, alike, lock_until_exit

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)  # of launchers and of Slurm; the latter as --signal=USR1@90 says
SAVED: Final = 75  # exit status: EX_TEMPFAIL of <sysexits.h>, "try again later"
_SAVED_FILE = "HOCKET_SAVED_FILE"  # where the launcher looks whether its ranks have ended so; beside it, it tells
_EVERY_S = 0.25  # between two questions to all ranks
_MOST_STEPS = 32  # as many steps at most: they may become longer
_MOST_PASSED = 64  # batches for which the first of several loops is waited for: it may have been left
_listening: WeakSet["Preemption"] = WeakSet()


def _note(number: int, frame: FrameType | None) -> None:
    del frame
    for one in _listening:
        one.told = number


class Preemption:
    """Notes signals, and between two batches saves and ends the program if any rank has got one.

    Args:
        world: All ranks; they must all make one, and then take the same batches.
        path: Where the checkpoint goes.
        save: Writes it; a collective operation.
        extra: Gives what is kept with it.

    Raises:
        ValueError: This is not the main thread, the only one that hears of signals.
        CheckpointError: Another program that runs saves to the path; or something else of this one, which has not
            begun either, is to be resumed: between whose batches both are saved, nobody has said.
    """

    def __init__(
        self, world: World, path: Path, save: Callable[[], None], extra: Callable[[], Any] = lambda: None
    ) -> None:
        lock_until_exit(path, world)
        with alike(world):
            if world.rank == 0 and _waiting():
                gc.collect()  # one that was replaced may be in a cycle
            if world.rank == 0 and _waiting():
                raise CheckpointError(
                    "resume was called for something else of this program, which has not trained yet, and a signal "
                    "would save one of the two: keep both by one hocket.resume(path, loader, one=..., other=...) "
                    "around loops of your own, or call this resume when that one has trained"
                )
        self.in_hand = False  # whether a loader has given a batch since the last step
        self._loops: list[SharedLoader] = []  # whose batches are being taken, the first to be begun first
        self._passed = 0  # times that nobody was asked, since several loops are under way
        self._world = world
        self._path = path
        self._save = save
        self._extra = extra
        self.look: Callable[[], None] = lambda: None  # refuses before the first batch what no save would take
        self._saved: tuple[bytes, str] | None = None  # what extra gave as the program itself saved, to be compared
        self._compared = False
        self.begun = False  # whether there was a batch after which it could save
        self.told = 0
        self._calls = self._due = 0
        self._apart = 1  # calls between the last two questions
        self._asked_s = time.monotonic()
        for number in SIGNALS:
            signal.signal(number, _note)
        _listening.add(self)
        if os.path.exists(f"{os.environ.get(_SAVED_FILE, '')}.told"):  # before anybody here listened
            self.told = signal.SIGUSR1

    def batches(self, shared: SharedLoader) -> Iterator[Any]:
        """Yield a loader's batches of an epoch; what the program does with one is done before anything is saved.

        After the last batch nothing is saved, since the epoch's number is the program's: the next epoch begins with it.
        Of several loops (`zip` of two loaders) the first one tells when all batches that were given are used.
        """
        self._loops.append(shared)
        try:
            self._between(shared)
            for part in shared:
                self.in_hand = True
                yield part
                if shared.inside:
                    self._between(shared)
        finally:
            self._loops.remove(shared)

    def _between(self, shared: SharedLoader) -> None:
        if self.in_hand or (shared is not self._loops[0] and self._passed < _MOST_PASSED):
            self._passed += 1
            return
        self._passed = 0
        self.check()

    @property
    def inside(self) -> bool:
        """Whether batches of a loader are being taken."""
        return bool(self._loops)

    def check(self) -> None:
        """Ask all ranks now and then; a collective operation.

        Raises:
            SystemExit: One was told to end, and the checkpoint is written.
        """
        if not self.begun:
            self.begun = True
            self.look()
        if self._saved is not None and not self.inside:
            self._compare(*self._saved)
        self._calls += 1
        if self._calls <= self._due:
            return
        now_s = time.monotonic()
        told = self._world.from_all((self.told, (now_s - self._asked_s) / self._apart))
        self._asked_s = now_s
        slowest_s = max(seconds for _, seconds in told)
        # The first step may be short or long as no other is: from one call to many in doublings.
        self._apart = max(1, min(_MOST_STEPS, 2 * self._apart, int(_EVERY_S / max(slowest_s, 1e-6))))
        self._due = self._calls + self._apart - 1
        number = max(number for number, _ in told)
        if number:
            self._end(signal.Signals(number).name)

    def saved(self, path: Path, extra: Any) -> None:
        """Learn that the program itself saves, to the same path and what `extra` gives, say; a collective operation.

        In a loop without `batches` a signal saves before a step, when the loop's counters may have gone on.
        """
        if self._compared or self.inside or path != self._path:
            return
        given = self._extra()
        with contextlib.suppress(Exception):  # what cannot be pickled is told where it is saved
            if (found := _digest(given)) == _digest(extra):
                self._saved, self._compared = (found, reprlib.repr(given)), True

    def _compare(self, digest: bytes, before: str) -> None:
        """Warn if what `extra` gives before a step is something else than after the one before it; once."""
        self._saved = None
        given = self._extra()
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            if _digest(given) != digest and self._world.rank == 0:
                warn(
                    f"resume: extra gave {before} as this program saved, and gives {reprlib.repr(given)} before the "
                    "step that follows, though the weights are the same: a signal saves before a step, and a program "
                    "that goes on rightly from what it saves itself would leave out a step then. Give both a number "
                    "that is alike there, such as trainer.steps, the steps that are made, and go on with the step of "
                    "that number",
                )

    def _end(self, name: str) -> None:
        self._save()
        if self._world.rank == 0:
            text = f"hocket: {name}: a checkpoint is in {self._path}; the same command goes on from there"
            print(text, file=sys.stderr, flush=True)
        if (file := os.environ.get(_SAVED_FILE)) is None:
            raise SystemExit(SAVED)
        with contextlib.suppress(OSError):
            Path(file).write_text(name)
        raise SystemExit(0)


def _digest(values: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(values)).digest()


def _waiting() -> bool:
    return any(not one.begun for one in _listening)
