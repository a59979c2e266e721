"""Collectives by schedules over point-to-point: what the table of choices says, executed."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hocket.algorithms import Choice, Choices, from_toml, get
from hocket.schedule import Collective, Schedule, ScheduleError, Wire

from ..transport import Flats, ReduceOperator, Transport, reducer
from ._execute import EndpointExecutor, NotAgreedError, PointToPoint, Scratch, perform

# Gloo over a 10 Gbit/s Ethernet: TCP's latency as Gloo's pairs see it, what each further message of a step costs this
# executor, TCP's rate, and torch.add from memory on one core. What differs from it is for `hocket tune` to find out.
ETHERNET: Final = Wire(latency_s=50e-6, seconds_per_byte=1 / 1.1e9, reduce_seconds_per_byte=1 / 8e9, message_s=20e-6)

_chosen: Choices | None = None


def choose(choices: Choices | str | os.PathLike[str] | None) -> None:
    """Say which algorithms this process uses between hosts; on every rank alike.

    Args:
        choices: A table; a text as `Choices.parse` reads it, for example `"all_reduce >=64KiB ring"`; the path of a
            TOML file that `hocket tune` wrote; or None for what HOCKET_CHOICES (text or path) says. Closed forms fill
            what a table leaves open.

    Raises:
        ScheduleError: the text or file is not understood.
    """
    global _chosen
    _chosen = None if choices is None else _read(choices)
    table_of.cache_clear()


@functools.lru_cache(maxsize=64)
def table_of(world: int) -> Choices:
    """Return the table for groups of `world` ranks."""
    given = _chosen
    if given is None and (setting := os.environ.get("HOCKET_CHOICES")):
        given = _read(setting)
    default = Choices.by_closed_form(ETHERNET, world)
    return default if given is None else given | default


def table_is_given() -> bool:
    """Return whether the user has said which algorithms to use, so that small operations follow that too."""
    return _chosen is not None or bool(os.environ.get("HOCKET_CHOICES"))


def _read(choices: Choices | str | os.PathLike[str]) -> Choices:
    if isinstance(choices, Choices):
        return choices
    path = Path(choices)
    if path.suffix == ".toml" or not isinstance(choices, str):
        try:
            return from_toml(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"the table of choices {str(path)!r} cannot be read: {error}") from None
    return Choices.parse(choices)


PIECE_NBYTES: Final = 4 << 20
"""Messages are cut near this size, so that one piece is reduced or sent on while the next is on the wire. On loopback,
where nothing is gained, pieces of 1 MiB cost up to 15% (n=8, 64 MiB), of 4 MiB nothing that can be measured."""
MOST_PIECES: Final = 8

_BUSY: Final = 0.6
"""The part of the time in which some endpoint sends or receives, from which on messages are not cut."""

_parts_kept = 256


class ScheduledTransport:
    """Collectives of flat CPU tensors over point-to-point.

    Args:
        points: Messages to the other ranks.
        rank: Number of this rank.
        size: Number of ranks.
        engine: Engine for what has no plan: blocks of different lengths.
        table: Table of choices for a number of ranks; by default what `hocket.comm.choose` and HOCKET_CHOICES say.
    """

    def __init__(
        self, points: PointToPoint, rank: int, size: int, engine: Transport, table: Callable[[int], Choices] = table_of
    ) -> None:
        self._table = table
        self._point_to_point = points
        self._engine = engine
        self._rank = rank
        self._size = size
        self._part = functools.lru_cache(maxsize=_parts_kept)(self._make_part)
        self._staging, self._buffer = Scratch(), Scratch()
        self._copying = reducer(torch.distributed.ReduceOp.BOR, torch.uint8)

    def all_reduce(self, flat: Tensor, op: ReduceOperator, timeout_s: float) -> str:
        path = self._in_place("all_reduce", flat, op, 0, timeout_s)
        op.finish(flat, self._size)
        return path

    def reduce(self, flat: Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        data = flat if self._rank == root else flat.clone()  # others' tensors stay as they are
        path = self._in_place("reduce", data, op, root, timeout_s)
        if self._rank == root:
            op.finish(data, self._size)
        return path

    def broadcast(self, flat: Tensor, root: int, timeout_s: float) -> str:
        return self._in_place("broadcast", flat.view(torch.uint8), self._copying, root, timeout_s)

    def all_gather(self, outputs: Flats, flat: Tensor, timeout_s: float) -> str:
        if any(output.numel() != flat.numel() for output in outputs):
            return self._engine.all_gather(outputs, flat, timeout_s)
        return self._blocks("all_gather", {self._rank: flat}, dict(enumerate(outputs)), None, 0, timeout_s)

    def reduce_scatter(self, output: Tensor, inputs: Flats, op: ReduceOperator, timeout_s: float) -> str:
        if any(one.numel() != output.numel() for one in inputs):
            return self._engine.reduce_scatter(output, inputs, op, timeout_s)
        path = self._blocks("reduce_scatter", dict(enumerate(inputs)), {self._rank: output}, op, 0, timeout_s)
        op.finish(output, self._size)
        return path

    def all_to_all(self, outputs: Flats, inputs: Flats, timeout_s: float) -> str:
        """See Transport. Lengths may differ from pair to pair, which no schedule knows: the engine does it."""
        return self._engine.all_to_all(outputs, inputs, timeout_s)

    def gather(self, outputs: Flats | None, flat: Tensor, root: int, timeout_s: float) -> str:
        wanted = dict(enumerate(outputs or ()))
        return self._blocks("gather", {self._rank: flat}, wanted, None, root, timeout_s, block=flat)

    def scatter(self, flat: Tensor, inputs: Flats | None, root: int, timeout_s: float) -> str:
        given = dict(enumerate(inputs or ()))
        return self._blocks("scatter", given, {self._rank: flat}, None, root, timeout_s, block=flat)

    def barrier(self, timeout_s: float) -> str:
        choice = self._pick("barrier", 0)
        chunks = _schedule(choice.algorithm, _frozen(choice), "barrier", self._size, 0).chunks
        word = torch.zeros(chunks, dtype=torch.uint8)  # a byte a chunk, for nothing would wait for an empty message
        return self._run(choice, "barrier", word, chunks, self._copying, 0, timeout_s)

    def _pick(self, kind: str, nbytes: int) -> Choice:
        return self._table(self._size).pick(kind, self._size, nbytes)

    def _in_place(self, kind: str, flat: Tensor, op: ReduceOperator, root: int, timeout_s: float) -> str:
        choice = self._pick(kind, flat.numel() * flat.element_size())
        return self._run(choice, kind, flat, flat.numel(), op, root, timeout_s)

    def _blocks(
        self,
        kind: str,
        given: Mapping[int, Tensor],
        wanted: Mapping[int, Tensor],
        op: ReduceOperator | None,
        root: int,
        timeout_s: float,
        *,
        block: Tensor | None = None,
    ) -> str:
        """Lay the blocks that this rank has into its buffer, run the schedule, and take out those that it wants."""
        one = block if block is not None else next(iter((*given.values(), *wanted.values())))
        numel = one.numel()
        choice = self._pick(kind, numel * one.element_size() * self._size)
        part = self._part(choice.algorithm, _frozen(choice), kind, root, self._pieces(choice, kind, root, one, numel))
        buffer = self._buffer.take(part.numel(numel), one.dtype)
        for number, tensor in given.items():
            buffer[part.block(number, numel)] = tensor
        if op is None:
            raw = buffer.view(torch.uint8)
            self._perform(part, raw, numel * one.element_size(), self._copying, timeout_s)
        else:
            self._perform(part, buffer, numel, op, timeout_s)
        for number, tensor in wanted.items():
            tensor.copy_(buffer[part.block(number, numel)])
        return self._path(choice)

    def _run(
        self, choice: Choice, kind: str, buffer: Tensor, numel: int, op: ReduceOperator, root: int, timeout_s: float
    ) -> str:
        part = self._part(
            choice.algorithm, _frozen(choice), kind, root, self._pieces(choice, kind, root, buffer, numel)
        )
        self._perform(part, buffer, numel, op, timeout_s)
        return self._path(choice)

    def _perform(
        self, part: EndpointExecutor, buffer: Tensor, numel: int, op: ReduceOperator, timeout_s: float
    ) -> None:
        try:
            perform(part, buffer, numel, op, self._point_to_point, timeout_s, self._staging)
        except NotAgreedError:  # what others have begun to send may still arrive there
            self._staging, self._buffer = Scratch(), Scratch()
            raise

    def _path(self, choice: Choice) -> str:
        return f"{self._point_to_point.name} {choice.algorithm}"

    def _pieces(self, choice: Choice, kind: str, root: int, one: Tensor, block_numel: int) -> int:
        """In how many pieces messages are cut: the same on all ranks, since all look at the largest of all messages."""
        if not _leaves_idle(choice.algorithm, _frozen(choice), kind, self._size, root):
            return 1
        schedule = _schedule(choice.algorithm, _frozen(choice), kind, self._size, root)
        chunks = schedule.chunks // schedule.collective.blocks
        largest = _largest(choice.algorithm, _frozen(choice), kind, self._size, root)
        nbytes = block_numel * one.element_size() * largest // chunks
        return max(1, min(MOST_PIECES, nbytes // PIECE_NBYTES))

    def _make_part(self, name: str, parameters: "Frozen", kind: str, root: int, pieces: int) -> EndpointExecutor:
        return EndpointExecutor(_schedule(name, parameters, kind, self._size, root), self._rank, pieces=pieces)


Frozen = tuple[tuple[str, int | str | bool], ...]


def _frozen(choice: Choice) -> Frozen:
    return tuple(sorted(choice.parameters.items()))


@functools.lru_cache(maxsize=_parts_kept)
def _schedule(name: str, parameters: Frozen, kind: str, world: int, root: int) -> Schedule:
    return get(name).build(Collective(kind, world, root), **dict(parameters))


@functools.lru_cache(maxsize=_parts_kept)
def _largest(name: str, parameters: Frozen, kind: str, world: int, root: int) -> int:
    """Return the chunks of the largest message."""
    merged = _schedule(name, parameters, kind, world, root).merged()
    return max((int((step.stop - step.start).max()) for step in merged.steps if len(step)), default=1)


@functools.lru_cache(maxsize=_parts_kept)
def _leaves_idle(name: str, parameters: Frozen, kind: str, world: int, root: int) -> bool:
    """Return whether even the busiest endpoint waits for others much of the time, so that pieces can fill the gaps.

    So it is in trees. Where an endpoint sends or receives most of the time, as in rings and in halving-doubling, there
    is little to fill, and pieces of one step get into the way of the next: halving-doubling of 8 MiB on 8 hosts took 7%
    to 23% longer, as the simulator also says (`Settings.pieces`).
    """
    schedule = _schedule(name, parameters, kind, world, root)
    moved = np.zeros((2, schedule.endpoints))
    longest = 0.0
    for step in schedule.steps:
        length = step.stop - step.start
        now = [np.bincount(end, length, schedule.endpoints) for end in (step.source, step.destination)]
        moved += np.multiply(now, step.repeat)
        longest += float(np.max(now)) * step.repeat
    return float(moved.max()) < _BUSY * longest
