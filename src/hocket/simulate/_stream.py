"""Work on streams whose order is known beforehand: each piece is timed as it is added, without a loop over events.

Where nothing is shared but the streams themselves, a piece begins when the one before it on its stream has ended and
what it needs is there. That is what `simulate_step` finds for a `StepGraph` of computation alone, and costs a search of
many plans next to nothing.
"""


class Stream:
    """Something that does one thing at a time, in the order in which it is asked: a rank, a link.

    Attributes:
        free_s: When it has done all that it was asked for.
    """

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0

    def add(self, seconds: float, after: float = 0.0) -> float:
        """Return when a piece of work ends.

        Args:
            seconds: How long it takes.
            after: When what it needs is there.
        """
        self.free_s = max(self.free_s, after) + seconds
        return self.free_s
