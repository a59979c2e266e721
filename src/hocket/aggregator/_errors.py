"""What a client raises when the aggregator cannot do its work."""

from ._frames import FailCode


class AggregationError(Exception):
    """An operation could not be done by the aggregator."""


class AggregatorLostError(AggregationError):
    """The aggregator is gone, does not answer, or does not let this client in."""


class GroupFailedError(AggregationError):
    """The group is over.

    Attributes:
        code: Reason in words.
        member: Position of the member that caused it, or None.
        sequence: Number of the operation that it ended, or 0.
    """

    def __init__(self, message: str, code: FailCode, member: int | None, sequence: int) -> None:
        super().__init__(message)
        self.code = code
        self.member = member
        self.sequence = sequence
