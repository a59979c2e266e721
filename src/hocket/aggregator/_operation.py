"""One operation of one group at one aggregator: what has come, what it makes of it, and who gets the result."""

from collections.abc import Sequence
from typing import Protocol

from ._arithmetic import Array, fold
from ._frames import Done, Open, ProtocolError
from ._kinds import COMMITTED, COPYING, IN_BLOCKS, REDUCING, Kind
from ._member import Member, Parent
from ._pool import Pool


class OperationOwner(Protocol):
    """The group whose operation it is."""

    size: int
    total: int
    span: range
    pool: Pool
    members: dict[int, Member]
    parent: Parent | None

    def over(self, operation: "GroupOperation") -> None:
        """Note that an operation has been served."""

    def credit(self, member: Member, nbytes: int) -> None:
        """Let a member send more."""


class _Segment:
    """A segment to which some children have contributed."""

    __slots__ = ("next", "parts", "sum_buffer", "total")

    def __init__(self) -> None:
        self.next = 0
        self.parts: dict[int, Array] = {}
        self.total: Array | None = None
        self.sum_buffer: Array | None = None


class _Held:
    """A buffer that several connections send; given back when the last is done with it."""

    __slots__ = ("buffer", "credited", "left", "operation", "upper")

    def __init__(
        self, operation: "GroupOperation", buffer: Array, left: int, credited: Sequence[Member], upper: bool
    ) -> None:
        self.operation, self.buffer, self.left, self.credited, self.upper = operation, buffer, left, credited, upper
        operation.live += 1

    def release(self) -> None:
        self.left -= 1
        if not self.left:
            self.operation.retire(self)


class GroupOperation:
    """See the head of this module."""

    def __init__(self, group: OperationOwner, request: Open, now_s: float) -> None:
        self.request = request
        self.deadline_s = now_s + request.deadline_ms / 1000
        self.began_s = now_s
        self.opened: set[int] = set()
        self.acknowledged: set[int] = set()
        self.live = 0
        self._group = group
        self._ready = False
        self._reducing = request.kind in REDUCING
        self._fold = fold(request.operator, request.element) if self._reducing else None
        blocks = group.total if request.kind in IN_BLOCKS else 1
        self._block_nbytes = request.nbytes // blocks
        self._cursors: dict[int, int] = {}  # by child if reducing, else by block: the offset that must come next
        self._segments: dict[int, _Segment] = {}
        self._early: list[tuple[Member, int, Array]] = []
        self._to_come_nbytes = self._from_members_nbytes() + self._from_parent_nbytes()

    def _from_members_nbytes(self) -> int:
        request, span = self.request, self._group.span
        if self._reducing:
            return request.nbytes
        if request.kind == Kind.ALL_GATHER:
            return len(span) * self._block_nbytes
        return request.nbytes if request.root in span else 0

    def _from_parent_nbytes(self) -> int:
        request, span = self.request, self._group.span
        if self._group.parent is None:
            return 0
        match request.kind:
            case Kind.ALL_REDUCE:
                return request.nbytes
            case Kind.REDUCE:
                return request.nbytes if request.root in span else 0
            case Kind.REDUCE_SCATTER:
                return len(span) * self._block_nbytes
            case Kind.ALL_GATHER:
                return request.nbytes - len(span) * self._block_nbytes
            case Kind.BROADCAST:
                return 0 if request.root in span else request.nbytes
        return 0

    # --- what comes ---------------------------------------------------------------------------------------------------

    def open_by(self, member: Member) -> None:
        """Let a member take part."""
        self.opened.add(member.index)
        group = self._group
        if len(self.opened) < group.size:
            return
        self._ready = True
        if group.parent is not None:
            group.parent.open(self.request)
        elif self.request.kind == Kind.BARRIER:
            self.all_done()
            return
        early, self._early = self._early, []
        for source, offset, buffer in early:
            self._distribute(source, offset, buffer)

    def expect(self, member: Member, offset: int, nbytes: int) -> None:
        """Raise ProtocolError unless these are the bytes that must come next from `member`."""
        request = self.request
        if member.index not in self.opened:
            raise ProtocolError(f"a segment of operation {request.sequence}, which {member.label} has not begun")
        if self._reducing:
            key = member.index
            following = self._cursors.get(key, 0)
            end = request.nbytes
        else:
            key = offset // self._block_nbytes if self._block_nbytes else 0
            source = request.root if request.kind == Kind.BROADCAST else key
            if request.kind not in COPYING or source not in member.span:
                raise ProtocolError(f"a segment of operation {request.sequence}, to which {member.label} adds nothing")
            following = self._cursors.get(key, key * self._block_nbytes)
            end = (key + 1) * self._block_nbytes
        block_end = min(end, (following // self._block_nbytes + 1) * self._block_nbytes) if following < end else 0
        if offset != following or nbytes != min(request.segment_nbytes, block_end - following):
            raise ProtocolError(
                f"bytes {offset}:{offset + nbytes} of operation {request.sequence}; next is {following}"
            )
        self._cursors[key] = offset + nbytes

    def take(self, member: Member, offset: int, buffer: Array) -> None:
        """Take in the segment that `expect` allowed."""
        if not self._reducing:
            if self._ready:
                self._distribute(member, offset, buffer)
            else:
                self._early.append((member, offset, buffer))
            return
        segment = self._segments.get(offset)
        if segment is None:
            segment = self._segments[offset] = _Segment()
        segment.parts[member.index] = buffer
        self._fold_in(segment)
        if segment.next == self._group.size:
            del self._segments[offset]
            assert self._fold is not None
            assert segment.total is not None
            assert segment.sum_buffer is not None
            self._fold.end(segment.total, segment.sum_buffer)
            self._complete(offset, segment.sum_buffer)

    def _fold_in(self, segment: _Segment) -> None:
        fold = self._fold
        assert fold is not None
        while (part := segment.parts.pop(segment.next, None)) is not None:
            if segment.total is None:
                segment.total, segment.sum_buffer = fold.begin(part), part
            else:
                fold.add(segment.total, part)
                self._group.pool.give(part)
            segment.next += 1

    def take_from_parent(self, offset: int, buffer: Array) -> None:
        """Take in a segment of the result, or another member's, that has come down the tree."""
        self._to_come_nbytes -= buffer.nbytes
        self._deliver(offset, buffer, self._receivers(offset), (), upper=True)

    def acknowledge(self, member: Member) -> None:
        """Note that a member has its part of the result. Raises ProtocolError: it cannot know."""
        known = member.index in self.opened and member.index not in self.acknowledged
        if self.request.kind not in COMMITTED or not known or self._owes(member):
            raise ProtocolError(f"an ACK of operation {self.request.sequence} by {member.label}")
        self.acknowledged.add(member.index)
        if len(self.acknowledged) == self._group.size:
            if self._group.parent is not None:
                self._group.parent.acknowledge(self.request.sequence)
            else:
                self.all_done()

    def all_done(self) -> None:
        """Finish, since every member has its part, all over the tree."""
        for member in self._group.members.values():
            member.link.send(Done(member.handle, self.request.sequence))
        self._group.over(self)

    # --- what goes ----------------------------------------------------------------------------------------------------

    def _complete(self, offset: int, result: Array) -> None:
        """Send the result: all children of this aggregator are in it."""
        self._to_come_nbytes -= result.nbytes
        everyone = list(self._group.members.values())
        if self._group.parent is None:
            self._deliver(offset, result, self._receivers(offset), everyone)
        else:
            held = _Held(self, result, 1, everyone, upper=False)
            self._group.parent.send_up(self.request.sequence, offset, result, held.release)

    def _receivers(self, offset: int) -> list[Member]:
        members = self._group.members.values()
        if self.request.kind == Kind.REDUCE:
            return [member for member in members if self.request.root in member.span]
        if self.request.kind == Kind.REDUCE_SCATTER:
            block = offset // self._block_nbytes
            return [member for member in members if block in member.span]
        return list(members)

    def _distribute(self, source: Member, offset: int, buffer: Array) -> None:
        """Copy a member's segment to all others, here and above."""
        self._to_come_nbytes -= buffer.nbytes
        others = [member for member in self._group.members.values() if member is not source]
        self._deliver(offset, buffer, others, (source,), above=self._group.parent is not None)

    def _deliver(
        self,
        offset: int,
        buffer: Array,
        receivers: Sequence[Member],
        credited: Sequence[Member],
        *,
        upper: bool = False,
        above: bool = False,
    ) -> None:
        held = _Held(self, buffer, len(receivers) + above, credited, upper)
        if not held.left:
            self.retire(held)
            return
        for member in receivers:
            member.link.send_data(member.handle, self.request.sequence, offset, buffer, held.release)
        if above:
            assert self._group.parent is not None
            self._group.parent.send_up(self.request.sequence, offset, buffer, held.release)

    def retire(self, held: _Held) -> None:
        """Give credit for a buffer that nobody needs any more: whoever filled it may send as much again."""
        nbytes = held.buffer.nbytes
        self._group.pool.give(held.buffer)
        self.live -= 1
        if held.upper and self._group.parent is not None:
            self._group.parent.consumed(nbytes)
        for member in held.credited:
            self._group.credit(member, nbytes)
        if not self.live and not self._to_come_nbytes and self.request.kind not in COMMITTED:
            self._group.over(self)

    def lacks(self, member: Member) -> bool:
        """Return whether it cannot be finished without hearing more from `member`."""
        if member.index not in self.opened or (
            self.request.kind in COMMITTED and member.index not in self.acknowledged
        ):
            return True
        return self._owes(member)

    def missing(self) -> list[Member]:
        """For whom it waits: those who have not begun, or else have not sent all, or else have not confirmed."""
        members = list(self._group.members.values())
        absent = [member for member in members if member.index not in self.opened]
        if absent:
            return absent
        slow = [member for member in members if self.lacks(member)]
        return slow or [member for member in members if member.link.waiting]

    def _owes(self, member: Member) -> bool:
        if self._reducing:
            return self._cursors.get(member.index, 0) < self.request.nbytes
        if self.request.kind == Kind.BARRIER:
            return False
        if self.request.kind == Kind.BROADCAST:
            return self.request.root in member.span and self._cursors.get(0, 0) < self.request.nbytes
        size = self._block_nbytes
        return any(self._cursors.get(block, block * size) < (block + 1) * size for block in member.span)
