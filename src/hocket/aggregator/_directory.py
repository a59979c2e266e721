"""The groups of an aggregator: where members meet, how much may be promised to them, and what has become of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from ._frames import NOBODY, Fail, FailCode, Join, ProtocolError
from ._group import Group
from ._member import Member, Parent
from ._pool import Pool

if TYPE_CHECKING:
    from ._connection import Connection
    from ._operation import GroupOperation
    from ._settings import Limits
    from ._stats import Stats

Climb = Callable[[Group, bytes, bytes], Parent]
"""Connects a group, by its name and a token, to the aggregator above. Raises OSError if there is no way."""


class Directory:
    """See the head of this module; it is the `Registry` of connections and the `Owner` of groups."""

    def __init__(self, limits: Limits, stats: Stats, climb: Climb | None) -> None:
        self.indebted: set[Group] = set()
        """Groups with credits to send."""
        self._limits = limits  # quotas
        self._stats = stats  # counters of groups and operations
        # function that leads groups which span more than this aggregator to its parent; None if it has none
        self._climb = climb
        self._pool = Pool()
        self._forming: dict[tuple[bytes, bytes], Group] = {}
        self._groups: dict[Group, tuple[bytes, bytes]] = {}
        self._reserved_nbytes = 0

    def join(self, connection: Connection, join: Join) -> None:
        """See Registry."""
        limits = self._limits
        level, key = join.levels[0], (connection.key, join.name)
        label = join.label.decode(errors="replace") or f"member {level.first}"
        group = self._forming.get(key)
        if group is None:
            reserved = level.size * limits.window_nbytes
            reason = self._quota(connection, level.size, reserved)
            if reason is not None:
                self._turn_away(connection, join, label, reason)
                return
            group = Group(join, self._pool, limits, self)
            self._forming[key] = group
            self._groups[group] = key
            self._reserved_nbytes += reserved
        reason = group.admits(join)
        if reason is not None:
            raise ProtocolError(f"a JOIN of group {group.name!r} that does not fit: {reason}")
        older = group.members.get(level.child)
        if older is not None:  # it has come back before its old connection was seen to be gone
            older.gone = True
            older.link.send(Fail(older.handle, 0, FailCode.MEMBER_LOST, level.first, f"{label} has come a second time"))
        member = Member(connection, join.group, level, label)
        group.members[level.child] = member
        connection.places[join.group] = group, member
        if len(group.members) == group.size:
            del self._forming[key]
            self._begin(group, join.name, connection.token)

    def _quota(self, connection: Connection, size: int, reserved: int) -> str | None:
        limits = self._limits
        groups = sum(key == connection.key for key, _ in self._groups.values())
        if groups >= limits.groups:
            return f"there are {groups} groups already, as many as are allowed"
        if size > limits.members:
            return f"{size} members in a group; {limits.members} are allowed"
        if self._reserved_nbytes + reserved > limits.nbytes:
            return f"its windows need {reserved} bytes and {limits.nbytes - self._reserved_nbytes} are left"
        return None

    def _turn_away(self, connection: Connection, join: Join, label: str, reason: str) -> None:
        """Refuse a group without ending the connection."""
        refused = Group(join, self._pool, self._limits, self)
        member = Member(connection, join.group, join.levels[0], label)
        refused.members[join.levels[0].child] = member
        connection.places[join.group] = refused, member
        refused.fail_position(FailCode.QUOTA, NOBODY, f"group {refused.name!r} is not taken: {reason}")

    def _begin(self, group: Group, name: bytes, token: bytes) -> None:
        if not group.spans_meet():
            group.fail(FailCode.PROTOCOL, None, "the positions of its members do not follow each other")
        elif not group.above:
            self._stats.groups += 1
            group.form(secrets.randbits(63) | 1)
        elif self._climb is None:
            group.fail(FailCode.PROTOCOL, None, "it spans more than this aggregator, which has no parent")
        else:
            self._stats.groups += 1
            try:
                group.parent = self._climb(group, name, token)
            except OSError as error:
                group.fail(FailCode.PARENT_LOST, None, f"the parent aggregator cannot be reached: {error}")

    def group_over(self, group: Group, code: FailCode | None) -> None:
        """See Owner."""
        key = self._groups.pop(group, None)
        if key is None:
            return
        if self._forming.get(key) is group:
            del self._forming[key]
        self._reserved_nbytes -= group.size * self._limits.window_nbytes
        if code is not None and code != FailCode.CLOSING:
            self._stats.groups_failed += 1

    def credits_due(self, group: Group) -> None:
        """See Owner."""
        self.indebted.add(group)

    def operation_over(self, operation: GroupOperation) -> None:
        """See Owner."""
        kind = operation.request.kind.name.lower()
        self._stats.operations[kind] = self._stats.operations.get(kind, 0) + 1

    def check(self, now_s: float) -> None:
        """End groups that wait for too long."""
        for group in list(self._groups):
            group.check(now_s)

    def close(self) -> None:
        for group in list(self._groups):
            group.fail(FailCode.CLOSING, None, "the aggregator is closing")
