"""A pipeline's order: what each of its ranks does, one action after the other, in a training step."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from .._collective import ScheduleError

COMPUTES: Final = ("F", "B", "I", "W")
"""Forward; backward; and the two halves of a backward: gradients of the inputs, gradients of the weights."""

MESSAGES: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Sends and receives of activations (F) and of their gradients (B)."""

UNIT: Final = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of each action where no other is given: both halves of a backward take as long as a forward."""

_NAME: Final = re.compile(r"[\w./:+-]+")
_ACTION: Final = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,9})")
_HEAD: Final = re.compile(r"order (\S+) ranks=(\d{1,9}) stages=(\d{1,9}) micro_batches=(\d{1,9})")
_A_LINE: Final = 16


class PipelineAction(NamedTuple):
    """One thing that a rank does. Its text, as "2F0", is that of `torch.distributed.pipelining`."""

    stage: int  # the stage that computes, sends or receives, from 0
    kind: str  # F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B; I and W are the two halves of B
    micro_batch: int  # the number of the micro-batch, from 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Played(NamedTuple):
    """Result of playing an order whose ranks compute each at its own pace, and whose messages take no time."""

    # (rank, action) of all that was done; each comes after all that it needs
    sequence: tuple[tuple[int, PipelineAction], ...]
    begins: tuple[tuple[float, ...], ...]  # when each action that was done began, by rank
    ends: tuple[tuple[float, ...], ...]  # when each of them ended, by rank
    # (rank, action, what it waits for) of every rank that cannot go on
    stuck: tuple[tuple[int, PipelineAction, PipelineAction], ...]

    @property
    def seconds(self) -> float:
        """When the last action ended, in the unit of the times given."""
        return max((rank[-1] for rank in self.ends if rank), default=0.0)


class Handover(NamedTuple):
    """What a computing action takes and hands on, as numbers, for whoever times an order again and again."""

    slot: int  # kind by kind (`COMPUTES`), the stage
    needs: int  # the number of what it takes from another stage; -1 for nothing
    makes: int  # the number of what it hands on; -1 for nothing
    target: int  # the rank that gets it
    boundary: int  # the first of the two stages between which a message passes; -1 if it stays on the rank


@dataclass(frozen=True)
class PipelineOrder:
    """What each rank of a pipeline does when, in one training step. A value: frozen, printable, parseable.

    A stage is on the rank that does its actions (`homes`). A rank does its actions one after the other. A forward needs
    the forward of the stage before, a backward (or its half for the inputs, I) the forward of its own stage and the
    backward of the stage behind, and the half for the weights (W) the half for the inputs. Messages between ranks may
    be left out, and are implied then; `with_messages` writes them. A send waits for nothing; a receive comes before
    what needs it, and messages from one rank to another are received in the order in which they are sent.

    Args:
        name: Name for people; letters, digits and _./:+-.
        stages: Stages in all; a multiple of the number of ranks.
        micro_batches: Parts of a batch that pass through the stages.
        ranks: Actions of every rank.

    Raises:
        ScheduleError: an action names a stage or a micro-batch that is not there. What else may be wrong is found by
            `verify`.
    """

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[PipelineAction, ...], ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"name {self.name!r}: use letters, digits and _./:+-")
        if min(self.stages, self.micro_batches, self.world) < 1 or self.stages % self.world:
            raise ScheduleError(
                f"order {self.name}: {self.stages} stages on {self.world} ranks and {self.micro_batches} "
                "micro-batches; give 1 or more of each, and stages that are a multiple of the ranks"
            )
        for rank, actions in enumerate(self.ranks):
            for number, action in enumerate(actions):
                _check(f"rank {rank}, action {number}", action, self.stages, self.micro_batches)

    def __str__(self) -> str:
        """Return one line for what it is, one for each rank, and its actions, 16 a line."""
        lines = [f"order {self.name} ranks={self.world} stages={self.stages} micro_batches={self.micro_batches}"]
        for rank, actions in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            words = [str(action) for action in actions]
            lines.extend("  " + " ".join(words[at : at + _A_LINE]) for at in range(0, len(words), _A_LINE))
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> PipelineOrder:
        """Read what `str(order)` wrote; empty lines and what follows a # are left out.

        Raises:
            ScheduleError: with the number of the line that is not understood.
        """
        rows = _rows(text)
        number, line = rows[0] if rows else (1, "")
        head = _HEAD.fullmatch(line)
        if head is None:
            raise ScheduleError(f"line {number}: {line!r}; expected 'order NAME ranks=N stages=N micro_batches=N'")
        ranks: list[list[PipelineAction]] = []
        for number, line in rows[1:]:
            if line.startswith("rank"):
                if line.removesuffix(":") != f"rank {len(ranks)}":
                    raise ScheduleError(f"line {number}: {line!r}; expected 'rank {len(ranks)}'")
                ranks.append([])
                continue
            for word in line.split():
                match = _ACTION.fullmatch(word)
                if match is None or not ranks:
                    raise ScheduleError(f"line {number}: {word!r}; expected 'rank 0', or actions as 0F0, 1SEND_B3")
                ranks[-1].append(PipelineAction(int(match[1]), match[2], int(match[3])))
                _check(f"line {number}", ranks[-1][-1], int(head[3]), int(head[4]))
        if len(ranks) != int(head[2]):
            raise ScheduleError(f"order {head[1]}: ranks={head[2]}, and the actions of {len(ranks)} are given")
        return cls(head[1], int(head[3]), int(head[4]), tuple(map(tuple, ranks)))

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that each rank holds."""
        return self.stages // self.world

    @property
    def homes(self) -> tuple[int, ...]:
        """Of every stage the rank that holds it, see `home`."""
        return tuple(map(self.home, range(self.stages)))

    def home(self, stage: int) -> int:
        """Return the rank that holds a stage: it does most of the stage's actions, and all of them if nothing is wrong.

        A stage of which nobody does anything is held to be missing on the rank with the fewest stages.
        """
        return self._homes.get(stage, self._fewest)

    @cached_property
    def _homes(self) -> dict[int, int]:
        done: dict[int, Counter[int]] = {}  # as long as the order, whatever number of stages a file may say
        for rank, actions in enumerate(self.ranks):
            for stage, *_ in actions:
                done.setdefault(stage, Counter())[rank] += 1
        homes = {}
        for stage, counts in done.items():
            much = max(counts.values())
            able = [rank for rank, count in counts.items() if count == much]
            homes[stage] = stage % self.world if stage % self.world in able else able[0]
        return homes

    @cached_property
    def _fewest(self) -> int:
        held = Counter(self._homes.values())
        return min(range(self.world), key=lambda rank: held[rank])

    def apart(self, stage: int) -> bool:
        """Return whether there is a stage behind this one, on another rank."""
        return 0 <= stage < self.stages - 1 and self.home(stage) != self.home(stage + 1)

    @cached_property
    def explicit(self) -> bool:
        """Whether sends and receives are written, rather than implied."""
        return any(action.kind in MESSAGES for rank in self.ranks for action in rank)

    @cached_property
    def halves(self) -> bool:
        """Whether some backwards are done in two halves."""
        return any(action.kind == "W" for rank in self.ranks for action in rank)

    def warm_up(self, rank: int) -> int:
        """Return the forwards that a rank does before its first backward."""
        kinds = [action.kind for action in self.ranks[rank] if action.kind in COMPUTES]
        return next((at for at, kind in enumerate(kinds) if kind != "F"), len(kinds))

    def in_flight(self, rank: int) -> float:
        """Return the micro-batches whose activations a rank holds at most, in units of all of its stages.

        They are held from a forward to its backward, or to that half of it which is for the inputs.
        """
        return most(self.ranks[rank], IN_FLIGHT) / self.stages_per_rank

    def weights_left(self, rank: int) -> float:
        """Return the micro-batches whose gradients of weights are still to be computed at most, in all stages."""
        return most(self.ranks[rank], {"I": 1, "W": -1}) / self.stages_per_rank

    def idle_share(self) -> float:
        """Return the part of the ranks' time without computation, if all stages are equal and times are `UNIT`."""
        played = self.played
        busy = sum(UNIT[action.kind] for _, action in played.sequence if action.kind in UNIT)
        return 1 - busy / (self.world * played.seconds) if busy else 0.0

    def forwards(self, rank: int) -> tuple[PipelineAction, ...]:
        """Return the forwards of a rank with their messages: what an evaluation does."""
        return tuple(action for action in self.ranks[rank] if action.kind in ("F", "SEND_F", "RECV_F"))

    def backwards(self, rank: int) -> tuple[PipelineAction, ...]:
        """Return all else that a rank does."""
        return tuple(action for action in self.ranks[rank] if action.kind not in ("F", "SEND_F", "RECV_F"))

    # --- what happens -----------------------------------------------------------------------------------------------

    def needs(self, action: PipelineAction) -> Iterator[PipelineAction]:
        """Return every action that must be done before this one can be.

        What a B has made, or else an I, is called I here.
        """
        stage, kind, micro_batch = action
        if kind == "F" and stage:
            where, what = (stage, "RECV_F") if self.explicit and self.apart(stage - 1) else (stage - 1, "F")
            yield PipelineAction(where, what, micro_batch)
        elif kind in ("B", "I"):
            yield PipelineAction(stage, "F", micro_batch)
            if stage < self.stages - 1:
                where, what = (stage, "RECV_B") if self.explicit and self.apart(stage) else (stage + 1, "I")
                yield PipelineAction(where, what, micro_batch)
        elif kind in ("W", "SEND_B"):
            yield PipelineAction(stage, "I", micro_batch)
        elif kind == "SEND_F":
            yield PipelineAction(stage, "F", micro_batch)
        elif kind == "RECV_F":
            yield PipelineAction(stage - 1, "SEND_F", micro_batch)
        elif kind == "RECV_B":  # what it receives is as large as what the forward has sent
            yield PipelineAction(stage, "F", micro_batch)
            yield PipelineAction(stage + 1, "SEND_B", micro_batch)

    @cached_property
    def played(self) -> Played:
        """Result of playing the order if times are `UNIT`, and messages take none."""
        done: dict[PipelineAction, float] = {}
        clocks, places = [0.0] * self.world, [0] * self.world
        begins: list[list[float]] = [[] for _ in self.ranks]
        ends: list[list[float]] = [[] for _ in self.ranks]
        sequence: list[tuple[int, PipelineAction]] = []
        blocked: list[tuple[int, PipelineAction, PipelineAction]] = []
        moved = True
        while moved:
            moved, blocked = False, []
            for rank, actions in enumerate(self.ranks):
                while places[rank] < len(actions):
                    action = actions[places[rank]]
                    missing = next((need for need in self.needs(action) if need not in done), None)
                    if missing is not None:
                        blocked.append((rank, action, missing))
                        break
                    there = max((done[need] for need in self.needs(action)), default=0.0)
                    begin = max(clocks[rank], there) if action.kind in UNIT else clocks[rank]
                    clocks[rank] = end = begin + UNIT.get(action.kind, 0.0)
                    done[action] = max(end, there)  # a receive is posted, and its message comes when it comes
                    if action.kind == "B":
                        done[action._replace(kind="I")] = end
                    begins[rank].append(begin)
                    ends[rank].append(end)
                    sequence.append((rank, action))
                    places[rank] += 1
                    moved = True
        return Played(tuple(sequence), tuple(map(tuple, begins)), tuple(map(tuple, ends)), tuple(blocked))

    @property
    def computing(self) -> tuple[tuple[PipelineAction, ...], ...]:
        """Of every rank what it computes, its messages left out."""
        return self.computes().ranks if self.explicit else self.ranks

    @cached_property
    def handovers(self) -> tuple[tuple[Handover, ...], ...]:
        """Of every rank, of all that it computes, what is taken and handed on."""
        last, count = self.stages - 1, self.micro_batches

        def of(stage: int, kind: str, micro_batch: int) -> Handover:
            slot, back, way = COMPUTES.index(kind) * self.stages + stage, int(kind != "F"), 1 if kind == "F" else -1
            onward, edge = stage + way, last if back else 0
            needs = -1 if kind == "W" or stage == edge else (back * self.stages + stage) * count + micro_batch
            if kind == "W" or not 0 <= onward <= last:
                return Handover(slot, needs, -1, -1, -1)
            makes, boundary = (back * self.stages + onward) * count + micro_batch, min(stage, onward)
            return Handover(slot, needs, makes, self.home(onward), boundary if self.apart(boundary) else -1)

        return tuple(tuple(of(*action) for action in rank) for rank in self.computing)

    def computes(self) -> PipelineOrder:
        """Return the same with its messages implied."""
        ranks = tuple(tuple(action for action in rank if action.kind in COMPUTES) for rank in self.ranks)
        return PipelineOrder(self.name, self.stages, self.micro_batches, ranks)

    def with_messages(self) -> PipelineOrder:
        """Return the same with its messages written; made once.

        A send follows what it sends. A receive comes where its rank is when the message is sent, as far as `played`
        tells: not later, so that the message can be on its way, and not much earlier, so that nothing waits behind it.

        Raises:
            ScheduleError: its ranks wait for each other.
        """
        return self if self.explicit or self.world == 1 else self._with_messages

    @cached_property
    def _with_messages(self) -> PipelineOrder:
        if self.played.stuck:
            rank, action, missing = self.played.stuck[0]
            raise ScheduleError(f"order {self.name}: rank {rank} waits at {action} for {missing}, which never comes")
        posted: list[list[tuple[int, float, PipelineAction]]] = [[] for _ in self.ranks]
        for rank, actions in enumerate(self.ranks):
            for action, end in zip(actions, self.played.ends[rank], strict=True):
                message = self.message(action)
                if message is not None:
                    to = self.home(message.stage)
                    posted[to].append((bisect.bisect_left(self.played.begins[to], end), end, message))
        ranks = []
        for rank, actions in enumerate(self.ranks):
            receives = iter(sorted(posted[rank]))
            waiting = next(receives, None)
            row: list[PipelineAction] = []
            for at, action in enumerate(actions):
                while waiting is not None and waiting[0] <= at:
                    row.append(waiting[2])
                    waiting = next(receives, None)
                row.append(action)
                if self.message(action) is not None:
                    row.append(action._replace(kind="SEND_F" if action.kind == "F" else "SEND_B"))
            ranks.append(tuple(row))
        return PipelineOrder(self.name, self.stages, self.micro_batches, tuple(ranks))

    def message(self, action: PipelineAction) -> PipelineAction | None:
        """Return another rank's receive of what this forward or backward has made; None if no other rank needs it."""
        stage, kind, micro_batch = action
        if kind == "F" and self.apart(stage):
            return PipelineAction(stage + 1, "RECV_F", micro_batch)
        if kind in ("B", "I") and self.apart(stage - 1):
            return PipelineAction(stage - 1, "RECV_B", micro_batch)
        return None


IN_FLIGHT: Final = {"F": 1, "B": -1, "I": -1}
"""What actions add to the activations that a rank holds."""


def most(actions: Sequence[PipelineAction], change: dict[str, int]) -> int:
    """Return the most that is there while a rank's actions change it."""
    return max(itertools.accumulate((change.get(action.kind, 0) for action in actions), initial=0))


_KINDS: Final = (*COMPUTES, *MESSAGES)


def _check(where: str, action: PipelineAction, stages: int, micro_batches: int) -> None:
    stage, kind, micro_batch = action
    if not (0 <= stage < stages and 0 <= micro_batch < micro_batches and kind in _KINDS):
        raise ScheduleError(
            f"{where}: {stage}{kind}{micro_batch}; stages are 0 to {stages - 1}, micro-batches 0 to "
            f"{micro_batches - 1}, and kinds {', '.join(_KINDS)}"
        )


def _rows(text: str) -> list[tuple[int, str]]:
    """Return the lines that say something, one space between words, with their numbers."""
    lines = ((number, " ".join(raw.split("#", 1)[0].split())) for number, raw in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line]


def line_of(text: str, rank: int, action: int | None) -> int:
    """Return in which line of an order's text an action stands, or where its rank begins if there is none."""
    at, left = -1, action
    for number, line in _rows(text)[1:]:
        if line.startswith("rank"):
            at += 1
            if at == rank and left is None:
                return number
        elif at == rank and left is not None:
            left -= len(line.split())
            if left < 0:
                return number
    raise IndexError(f"rank {rank} has no action {action}")
