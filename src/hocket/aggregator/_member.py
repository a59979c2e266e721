"""Who a group deals with at one aggregator: its members below, and the aggregator above."""

from typing import Protocol

from ._frames import FailCode, Level, Open
from ._link import FrameLink, Release
from ._pool import Array


class Parent(Protocol):
    """The way up the tree."""

    def open(self, request: Open) -> None:
        """Learn that all children of this aggregator have begun the operation."""

    def send_up(self, sequence: int, offset: int, payload: Array, release: Release) -> None:
        """Send a segment up as soon as the window allows."""

    def acknowledge(self, sequence: int) -> None:
        """Learn that all children of this aggregator have their part."""

    def consumed(self, nbytes: int) -> None:
        """So much of what came down has been passed on."""

    def end(self, code: FailCode, member: int, reason: str) -> None:
        """End with the group, and say why if there is still somebody to say it to."""


class Member:
    """A child of this aggregator in one group: a client, or an aggregator that speaks for several."""

    def __init__(self, link: FrameLink, handle: int, level: Level, label: str) -> None:
        self.link = link
        self.handle = handle
        self.index = level.child
        self.span = range(level.first, level.first + level.members)
        self.label = label
        self.held_nbytes = 0
        self.to_credit_nbytes = 0
        self.longest_nbytes = 0
        """Of the segments of all operations that it has begun."""
        self.sequence = 0
        self.gone = False
