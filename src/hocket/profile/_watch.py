"""Records this rank for as long as it lives: operations, steps, optimizer, data loading, garbage collection, samples.

One thread wakes four times a second. It notes where the main thread is and what it costs, and looks whether the rank
waits for longer than it should; then the records of all ranks tell why.
"""

import contextlib
import faulthandler
import functools
import json
import multiprocessing.util
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hocket import comm

from . import _layout as lay
from . import torch_adapter
from ._garbage import GarbageClock
from ._hang import Hang, find_hang, lost_on_the_way, standing
from ._links import links_used, undelivered
from ._live import live_ranks, users_frame
from ._record import RankRecord
from ._stacks import StackReader

if TYPE_CHECKING:
    from hocket.planner import Plan

_T = TypeVar("_T")
_EVERY_S = 0.25
_LINKS_EVERY_S = 1.0
_LINKS_SHARE = 0.002  # of a core may looking at connections take
_LAST_WORD_S = 2.0  # may a program that ends wait for the thread, which may be telling why ranks have waited
_LONG_GARBAGE_S = 0.0005

_watch: "Watch | None" = None


def watch(rank: int | None = None, world: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
    """Record this rank until it ends; a second call does nothing.

    Jobs on backend "hocket" need no call where HOCKET_RUN_DIR or HOCKET_RECORD says where. Others, on NCCL or Gloo,
    call it after `init_process_group`: all but their operations is recorded.

    Args:
        rank: Number of this rank; by default torch's, or RANK.
        world: Number of ranks; by default torch's, or WORLD_SIZE.
        folder: Where to; all ranks must see it. By default HOCKET_RECORD, or "record" in HOCKET_RUN_DIR.
            HOCKET_RECORD=off (or 0) records nothing.
    """
    global _watch
    if _watch is not None:
        return
    place = record_folder() if folder is None else Path(folder)
    if place is None:
        return
    if rank is None or world is None:
        rank, world = torch_adapter.rank_and_world()
    try:
        record = RankRecord(place, rank, world)
    except OSError as error:
        print(f"hocket: this run is not recorded in {str(place)!r}: {error.strerror or error}", file=sys.stderr)
        return
    _watch = Watch(record, place)
    name_run(torch_adapter.default_store())


def name_run(store: Any) -> None:
    """Record of which run this rank is, by a name that the first rank to come leaves in the store of the world's group.

    Nobody is waited for. Records of several runs in one folder are told apart by it.

    Args:
        store: A `torch.distributed.Store` that all ranks share and no other run; None: the run stays without a name.
    """
    if _watch is not None and store is not None:
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # the store is gone: the run has no name
            name = secrets.token_hex(lay.RUN_NBYTES)
            _watch.record.of_run(bytes.fromhex(store.compare_set("hocket-run", "", name).decode()))


def record_folder() -> Path | None:
    """Return where HOCKET_RECORD or HOCKET_RUN_DIR has records go; None for nowhere."""
    named, run = os.environ.get("HOCKET_RECORD"), os.environ.get("HOCKET_RUN_DIR")
    if named:
        return None if named in ("off", "0") else Path(named)
    return Path(run) / lay.FOLDER if run and run not in ("off", "0") else None


def phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Record what this rank does in the block: "data", "checkpoint", "evaluation" or any name of yours."""
    return contextlib.nullcontext() if _watch is None else _Phase(_watch.record, name)


class _Phase(contextlib.AbstractContextManager[None]):  # a generator would take twice as long
    def __init__(self, record: RankRecord, name: str) -> None:
        self._record, self._name = record, name

    def __enter__(self) -> None:
        self._before, self._begin_s = self._record.enter(self._name), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._record.enter_again(self._before)
        self._record.span(lay.PHASE, self._begin_s, time.perf_counter(), self._name)


def loading(batches: Iterable[_T]) -> Iterator[_T]:
    """Yield what an iterable gives, and record the time that it takes as loading of data."""
    iterator = iter(batches)
    while True:
        try:
            with phase("data"):
                batch = next(iterator)
        except StopIteration:
            return
        yield batch


def mark_step(begin_s: float, end_s: float) -> None:
    """Record a step of training that this program tells of; from the first on, updates of optimizers count none."""
    if _watch is not None:
        if not _watch.told and begin_s <= _watch.last_s <= end_s:
            _watch.steps -= 1  # the update that this first step made has been counted
        _watch.told = True
        _watch.step(begin_s, end_s)


def tell_steps() -> int:
    """Count no updates of optimizers as steps from now on, since the program tells of them; return how many it made."""
    if _watch is None:
        return 0
    _watch.told = True
    return _watch.steps


def note_value(name: str, value: float, step: int) -> None:
    """Record a number that belongs to a step, as its loss."""
    if _watch is not None:
        now_s = time.perf_counter()
        text = _watch.record.text(name)
        _watch.record.row(1, lay.VALUE, text=text, seq=step, times=(now_s, value, 0.0, 0.0, 0.0))


def note(name: str, value: Any) -> None:
    """Record a fact about the run: a JSON value of at most 60 KB; what is said last of a name counts."""
    if _watch is not None:
        _watch.record.text({"note": name, "value": value, "at_s": time.time()})


def note_plan(plan: "Plan") -> None:
    """Record the plan, whose degrees are filled in, so that it is known what would grow with more workers."""
    if _watch is not None:
        from hocket.planner import AXES

        axes = [(one.name, one.degree(plan)) for one in AXES]  # in whose order ranks are numbered, the last fastest
        note("plan", {"name": plan.describe(), "axes": axes, "predicted": dict(plan.predicted)})


@contextlib.contextmanager
def no_steps() -> Iterator[None]:
    """Count no updates of optimizers as steps in the block, where a program measures or tries something."""
    active = _watch
    if active is None:
        yield
        return
    active.resting = True
    try:
        yield
    finally:
        active.resting, active.last_s = False, 0.0


class Watch:
    """The listeners and the thread of one process."""

    def __init__(self, record: RankRecord, folder: Path) -> None:
        self.record = record
        self.told = self.resting = False
        self.last_s = 0.0  # when the last step ended
        self._folder, self._hangs = folder, folder / "hangs.jsonl"
        self._hangs_from = self._hangs.stat().st_size if self._hangs.exists() else 0  # behind those of a run before
        self.steps = 0
        self._update_s = 0.0
        self._links_due_s = 0.0
        self._sent: dict[tuple[str, str], int] = {}
        self._main = threading.main_thread()
        self._over = threading.Event()
        self._undo: list[Callable[[], object]] = [comm.observe(record)]
        comm.follow(record)
        self._undo += torch_adapter.follow_updates(self._before_update, self._after_update)
        self._undo.append(torch_adapter.wrap_loaders(loading_of))
        self._undo.append(torch_adapter.wrap_save(functools.partial(phase, "checkpoint")))
        self._garbage = GarbageClock()
        self._stacks = (folder / lay.STACKS.format(record.rank)).open("w")
        self._dumped = 0
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=True)
        self._cpu = _Cpu(self._main.native_id or record.pid)
        self._reader = StackReader(self._main.ident or 0)
        self.record.alive("\n".join(self._reader.read() or []), 1.0)
        os.register_at_fork(after_in_child=self._forget)
        # Unlike atexit's, this runs in children of multiprocessing, too.
        self._at_exit = multiprocessing.util.Finalize(None, self._end, exitpriority=0)
        self._thread = threading.Thread(target=self._loop, name="hocket-watch", daemon=True)
        self._thread.start()

    # --- listening --------------------------------------------------------------------------------------------------

    def _before_update(self) -> None:
        self._update_s = time.perf_counter()

    def _after_update(self) -> None:
        end_s = time.perf_counter()
        self.record.span(lay.PHASE, self._update_s, end_s, "optimizer")
        if not self.told and not self.resting:
            self.step(self.last_s or end_s, end_s)

    def step(self, begin_s: float, end_s: float) -> None:
        """Write a step."""
        self.steps += 1
        self.last_s = end_s
        self.record.span(lay.STEP, begin_s, end_s, seq=self.steps)
        self.record.stepped(self.steps, end_s - begin_s)

    def _forget(self) -> None:
        """In a forked child, which is no rank: it must not write into its parent's record."""
        global _watch
        _watch = None
        for undo in self._undo:
            undo()
        comm.follow(None)
        self._garbage.close()
        self._at_exit.cancel()
        self._reader.close()

    def _end(self) -> None:
        self._over.set()
        self._thread.join(_LAST_WORD_S)
        self._garbage.close()
        self.record.ended()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._over.wait(_EVERY_S):
            with contextlib.suppress(Exception):  # what watches must never end what it watches
                self._sample()
                self._note_garbage()
                if (now_s := time.perf_counter()) > self._links_due_s:
                    self._note_links(now_s)
                self._look()

    def _note_garbage(self) -> None:
        for begin_s, end_s in self._garbage.collected():
            if end_s - begin_s > _LONG_GARBAGE_S:
                self.record.span(lay.GARBAGE, begin_s, end_s)

    def _sample(self) -> None:
        numbers, busy = self._cpu.sample()
        nbytes = resident_nbytes()
        stack = self._reader.read()
        self.record.alive(None if stack is None else "\n".join(stack), busy, nbytes)
        text = 0 if stack is None else self.record.text(users_frame(stack))  # where it is now, not where it was
        self.record.row(1, lay.SAMPLE, text=text, nbytes=nbytes, times=numbers)

    def _note_links(self, now_s: float) -> None:
        for pair, use in links_used().items():
            if self._sent.get(pair) != use.nbytes:
                self._sent[pair] = use.nbytes
                self.record.row(
                    1, lay.LINK, text=self.record.text(pair), seq=use.resent, nbytes=use.nbytes,
                    times=(now_s, use.busy_s, use.rtt_s, use.least_rtt_s, 0.0),
                )  # fmt: skip
        self._links_due_s = now_s + max(_LINKS_EVERY_S, (time.perf_counter() - now_s) / _LINKS_SHARE)

    def _look(self) -> None:
        asked = os.fstat(self._stacks.fileno()).st_size
        if asked > self._dumped:
            self._dumped = asked
            if not self.record.quiet():
                ranks = live_ranks(self._folder)
                self._say(find_hang(ranks, 0.0) or standing(ranks))
        waits_s = self.record.waits_s()
        if waits_s > hang_s() and waits_s > 2 * self.record.patience_s:
            ranks = live_ranks(self._folder, dump=False)
            found = find_hang(ranks, hang_s())
            if found is None and (lost := undelivered()) is not None:  # ranks of other hosts have their records there
                found = lost_on_the_way(ranks, self.record.rank, lost)
            if found is not None and found.speaker == self.record.rank and not self._is_said(found):
                if found.kind == "native":  # only who speaks asks for stacks by a signal, which can end a sleep
                    found = find_hang(live_ranks(self._folder), hang_s()) or found
                self._say(found)

    def _is_said(self, found: Hang) -> bool:
        """Return whether a rank has said so: a lower one may come to wait meanwhile, and is then who speaks."""
        with contextlib.suppress(FileNotFoundError), self._hangs.open() as file:
            file.seek(self._hangs_from)
            return any((one["kind"], tuple(one["ranks"])) == (found.kind, found.ranks) for one in map(json.loads, file))
        return False

    def _say(self, found: Hang) -> None:
        with contextlib.suppress(OSError), self._hangs.open("a") as file:
            file.write(json.dumps(found.to_json()) + "\n")
        print("\n".join(f"hocket: {line}" for line in str(found).splitlines()), file=sys.stderr, flush=True)


def loading_of(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same and is recorded as loading of data."""

    @functools.wraps(load)
    def recorded(*args: Any) -> Any:
        active = _watch
        if active is None:
            return load(*args)
        record = active.record  # what `phase` does, in half the time
        before, begin_s = record.enter("data"), time.perf_counter()
        try:
            return load(*args)
        finally:
            record.enter_again(before)
            record.span(lay.PHASE, begin_s, time.perf_counter(), "data")

    return recorded


def hang_s() -> float:
    """Return after how many seconds of waiting a rank asks why: HOCKET_HANG_S, or 6."""
    try:
        return float(os.environ.get("HOCKET_HANG_S", "6"))
    except ValueError:
        return 6.0


def resident_nbytes() -> int:
    """Return the memory of this process that is resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Cpu:
    """What the main thread costs, as Linux tells it."""

    def __init__(self, thread: int) -> None:
        self._path = f"/proc/self/task/{thread}/schedstat"
        self._before = (time.perf_counter(), 0.0)

    def sample(self) -> tuple[tuple[float, float, float, float, float], float]:
        """Return the numbers of a SAMPLE, and the share of the time since the last call that the thread had a core."""
        ran_s = waited_s = 0.0
        with contextlib.suppress(OSError, ValueError), open(self._path) as file:
            ran_s, waited_s = (int(word) * 1e-9 for word in file.read().split()[:2])
        now_s = time.perf_counter()
        before_s, before_ran_s = self._before
        self._before = (now_s, ran_s)
        times = os.times()
        busy = (ran_s - before_ran_s) / max(now_s - before_s, 1e-9)
        return (now_s, times.user + times.system, ran_s, waited_s, core_mhz()), min(max(busy, 0.0), 1.0)


def core_mhz() -> float:
    """Return the frequency of the first core that this process may use, in MHz; 0 where Linux does not tell."""
    core = min(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq").read_text()) / 1e3
    return 0.0
