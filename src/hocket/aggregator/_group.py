"""A group at one aggregator: its members, their windows, its operations, and its end."""

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

from ._codec import check_open
from ._frames import NOBODY, Credit, Data, Fail, FailCode, Join, Joined, Level, Open, ProtocolError
from ._member import Member, Parent
from ._operation import GroupOperation
from ._pool import Pool

if TYPE_CHECKING:
    from ._settings import Limits

log = logging.getLogger("hocket.aggregator")

_CREDITS: Final = 8


class Owner(Protocol):
    """What a group tells the directory in which it stands."""

    def group_over(self, group: "Group", code: FailCode | None) -> None:
        """Nothing of the group is left; without a code all members have left it."""

    def operation_over(self, operation: GroupOperation) -> None:
        """Learn that an operation has been served."""

    def credits_due(self, group: "Group") -> None:
        """`Group.send_credits` has something to send."""


class Group:
    """See the head of this module."""

    def __init__(self, join: Join, pool: Pool, limits: "Limits", owner: Owner) -> None:
        self.total = join.total
        self.size = join.levels[0].size
        self.above = join.levels[1:]
        here = self.above[0] if self.above else Level(1, 0, 0, join.total)
        self.span = range(here.first, here.first + here.members)
        self.name = join.name.decode(errors="replace")
        self.pool = pool
        self.members: dict[int, Member] = {}
        self.parent: Parent | None = None
        self.operations: dict[int, GroupOperation] = {}
        self.ended = False
        self.formed = False
        self.began_s = time.monotonic()
        self._limits = limits
        self._owner = owner

    # --- how it begins ------------------------------------------------------------------------------------------------

    def admits(self, join: Join) -> str | None:
        """Return why a member does not fit, or None."""
        level = join.levels[0]
        if (join.total, level.size, join.levels[1:]) != (self.total, self.size, self.above):
            return f"it says {join.total} members, {level.size} here and {join.levels[1:]} above; others say otherwise"
        if level.first < self.span.start or level.first + level.members > self.span.stop:
            return f"positions {level.first}:{level.first + level.members} are outside those below this aggregator"
        return None

    def spans_meet(self) -> bool:
        """Return whether the members' positions follow each other in the order of their indices without gap."""
        following = self.span.start
        for index in range(self.size):
            span = self.members[index].span
            if span.start != following:
                return False
            following = span.stop
        return following == self.span.stop

    def form(self, generation: int) -> None:
        """Begin, since all members are there, all over the tree."""
        self.formed = True
        self.members = dict(sorted(self.members.items()))
        for member in self.members.values():
            member.link.send(Joined(member.handle, generation))
        log.info("group %s: %d of %d members here", self.name, self.size, self.total)

    # --- what members say ---------------------------------------------------------------------------------------------

    def open(self, member: Member, request: Open) -> None:
        """Begin an operation for a member. Raises ProtocolError: the request makes no sense."""
        if not self.formed:
            raise ProtocolError("an operation of a group whose members have not all come")
        check_open(request, self.total, self._limits.segment_nbytes)
        if request.sequence != member.sequence + 1:
            raise ProtocolError(f"operation {request.sequence} after {member.sequence}")
        member.sequence += 1
        member.longest_nbytes = max(member.longest_nbytes, request.segment_nbytes)
        if member.to_credit_nbytes:
            self._owner.credits_due(self)
        gone = next((other for other in self.members.values() if other.gone), None)
        if gone is not None:
            self.fail(FailCode.MEMBER_LOST, gone, f"{gone.label} has left the group", request.sequence)
            return
        operation = self.operations.get(request.sequence)
        if operation is None:
            if len(self.operations) >= self._limits.operations:
                raise ProtocolError(f"more than {self._limits.operations} operations at once in one group")
            operation = self.operations[request.sequence] = GroupOperation(self, request, time.monotonic())
        elif not _alike(request, operation.request):
            first = self.members[min(operation.opened)]
            self.fail(
                FailCode.MISMATCH,
                member,
                f"operation {request.sequence}: {first.label} asks for {describe(operation.request)}, "
                f"{member.label} for {describe(request)}",
                request.sequence,
            )
            return
        operation.open_by(member)

    def expect(self, member: Member, data: Data) -> None:
        """Raise ProtocolError unless a member may send this segment now."""
        operation = self.operations.get(data.sequence)
        if operation is None:
            raise ProtocolError(f"a segment of operation {data.sequence}, which is not under way")
        if member.held_nbytes + data.nbytes > self._limits.window_nbytes:
            raise ProtocolError(f"more than {self._limits.window_nbytes} bytes in flight in one group")
        operation.expect(member, data.offset, data.nbytes)
        member.held_nbytes += data.nbytes

    def acknowledge(self, member: Member, sequence: int) -> None:
        """Note that a member has its part of the result of an operation."""
        operation = self.operations.get(sequence)
        if operation is None:
            raise ProtocolError(f"an ACK of operation {sequence}, which is not under way")
        operation.acknowledge(member)

    def leave(self, member: Member) -> None:
        """Let a member go. What it has begun is finished without it; what it has not fails."""
        member.gone = True
        lacking = next((op for op in self.operations.values() if op.lacks(member)), None)
        if not self.formed or lacking is not None:
            sequence = 0 if lacking is None else lacking.request.sequence
            self.fail(FailCode.MEMBER_LOST, member, f"{member.label} has left the group", sequence)
        else:
            self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        if not self.operations and all(member.gone for member in self.members.values()):
            self._end(None)

    def credit(self, member: Member, nbytes: int) -> None:
        """Let a member send more; it learns so in the next round of the loop."""
        member.held_nbytes -= nbytes
        member.to_credit_nbytes += nbytes
        self._owner.credits_due(self)

    def send_credits(self) -> None:
        """Tell members what `credit` has noted, once it is an eighth of a window, or a member might wait for it.

        Every credit is a packet that wakes a process: with short operations there would be as many as results.
        """
        window_nbytes = self._limits.window_nbytes
        for member in self.members.values():
            to_credit = member.to_credit_nbytes
            if not to_credit or (
                to_credit < window_nbytes // _CREDITS
                and window_nbytes - member.held_nbytes - to_credit >= member.longest_nbytes
            ):
                continue
            member.to_credit_nbytes = 0
            if not member.gone:
                member.link.send(Credit(member.handle, to_credit))

    # --- how it ends --------------------------------------------------------------------------------------------------

    def over(self, operation: GroupOperation) -> None:
        if self.operations.pop(operation.request.sequence, None) is not None:
            self._owner.operation_over(operation)
            if not self.ended:
                self._end_if_deserted()

    def check(self, now_s: float) -> None:
        """End the group if an operation or the coming together takes too long."""
        if not self.formed:
            if now_s - self.began_s > self._limits.join_s:
                here = ", ".join(member.label for member in self.members.values())
                self.fail(
                    FailCode.TIMEOUT, None, f"of {self.size} members only {here} came within {self._limits.join_s:g} s"
                )
            return
        for operation in list(self.operations.values()):
            if now_s > operation.deadline_s:
                missing = operation.missing()
                names = ", ".join(member.label for member in missing) or "the other aggregators"
                what = describe(operation.request)
                self.fail(
                    FailCode.TIMEOUT,
                    missing[0] if missing else None,
                    f"operation {operation.request.sequence} ({what}) still waits for {names} "
                    f"{now_s - operation.began_s:.1f} s after it began",
                    operation.request.sequence,
                )
                return

    def fail(self, code: FailCode, culprit: Member | None, reason: str, sequence: int = 0) -> None:
        """End the group and tell everyone why.

        `culprit` is the member to whom it happened, None if nobody here; `sequence` 0 stands for the oldest operation
        under way.
        """
        member = NOBODY
        if culprit is not None and len(culprit.span) == 1:
            member = culprit.span.start
        self.fail_position(code, member, reason, sequence)

    def fail_position(self, code: FailCode, position: int, reason: str, sequence: int = 0) -> None:
        """Do as `fail`, for a member that may be below another aggregator."""
        if self.ended:
            return
        sequence = sequence or min(self.operations, default=0)
        for member in self.members.values():
            if not member.gone:
                member.link.send(Fail(member.handle, sequence, code, position, reason))
        log.warning("group %s is over: %s", self.name, reason)
        if self.parent is not None:
            self.parent.end(code, position, reason)
        self._end(code)

    def _end(self, code: FailCode | None) -> None:
        self.ended = True
        if code is None and self.parent is not None:
            self.parent.end(FailCode.CLOSING, NOBODY, "all members have left")
        self.operations.clear()
        self._owner.group_over(self, code)


def describe(request: Open) -> str:
    """Return an operation in words."""
    what = request.kind.name.lower()
    if request.operator:
        what += f" {request.operator.name.lower()}"
    return f"{what} of {request.nbytes} bytes of {request.element.name.lower()}, root {request.root}"


def _alike(one: Open, other: Open) -> bool:
    return one._replace(group=0, deadline_ms=0) == other._replace(group=0, deadline_ms=0)
