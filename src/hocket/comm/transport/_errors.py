"""What can go wrong between ranks, as exceptions that name the rank, the operation and its sequence number."""


class CommError(RuntimeError):
    """A collective could not be completed; the group cannot be used any more unless the message says otherwise.

    Attributes:
        peer: The rank in the group whose message did not pass; None where no single one is known.
    """

    peer: int | None = None


class PeerDiedError(CommError):
    """A rank of the group has died or left while others waited for it.

    Attributes:
        rank: The rank in the group that is gone.
        culprits: Its number in the world, where that is known, for who reads errors of several groups.
    """

    def __init__(self, message: str, rank: int, culprits: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.culprits = culprits

    # An exception is copied and pickled by calling its class with `args`, which holds the message alone.
    def __reduce__(self) -> "tuple[type[PeerDiedError], tuple[str, int, tuple[int, ...]]]":
        return type(self), (str(self), self.rank, self.culprits)


class CollectiveTimeoutError(CommError):
    """Some ranks had not arrived when the time-out of the operation had passed.

    Attributes:
        missing: The ranks in the group that had not arrived.
        culprits: Their numbers in the world, where these are known, for who reads errors of several groups.
    """

    def __init__(self, message: str, missing: tuple[int, ...], culprits: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        self.culprits = culprits

    def __reduce__(self) -> "tuple[type[CollectiveTimeoutError], tuple[str, tuple[int, ...], tuple[int, ...]]]":
        return type(self), (str(self), self.missing, self.culprits)


class CollectiveMismatchError(CommError):
    """The ranks called different operations, or the same with different sizes, types, roots or operators.

    Every rank of the group gets this error for the operation, and the group stays usable.
    """
