"""What can go wrong between ranks, as exceptions that name the rank, the operation and its sequence number."""


class CommError(RuntimeError):
    """A collective could not be completed; the group cannot be used any more unless the message says otherwise."""


class PeerDiedError(CommError):
    """A rank of the group has died or left while others waited for it.

    Attributes:
        rank: The rank in the group that is gone.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    # An exception is copied and pickled by calling its class with `args`, which holds the message alone.
    def __reduce__(self) -> "tuple[type[PeerDiedError], tuple[str, int]]":
        return type(self), (str(self), self.rank)


class CollectiveTimeoutError(CommError):
    """Some ranks had not arrived when the time-out of the operation had passed.

    Attributes:
        missing: The ranks in the group that had not arrived.
    """

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing

    def __reduce__(self) -> "tuple[type[CollectiveTimeoutError], tuple[str, tuple[int, ...]]]":
        return type(self), (str(self), self.missing)


class CollectiveMismatchError(CommError):
    """The ranks called different operations, or the same with different sizes, types, roots or operators.

    Every rank of the group gets this error for the operation, and the group stays usable.
    """
