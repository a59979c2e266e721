"""How many bytes of gradients are reduced together: what the planner times is what the Trainer takes."""

from dataclasses import dataclass

MAX_BUCKET_NBYTES = 64 * 2**20
MIN_BUCKET_NBYTES = 4 * 2**20
# Communication of the last bucket cannot hide behind back-propagation, so one bucket hides nothing; with eight of one
# size at least seven eighths can. More of them cost more latency than they hide.
_BUCKETS_WANTED = 8


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """How many bytes of gradients a bucket may hold; a larger gradient gets a bucket of its own.

    Attributes:
        most: Bytes of any bucket.
        first: Bytes of the first bucket, which back-propagation fills first.
    """

    most: int
    first: int

    @classmethod
    def choose(cls, total_nbytes: float, most: int | None = None, first: int | None = None) -> "BucketSizes":
        """Return the sizes that the user asked for, and good ones where nothing was said.

        Args:
            total_nbytes: Bytes of all gradients that a rank reduces.
            most: Bytes of any bucket, if they are given.
            first: Bytes of the first bucket, if they are given.

        Raises:
            ValueError: A size is not positive.
        """
        for name, value in (("bucket_bytes", most), ("first_bucket_bytes", first)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be a positive number of bytes, not {value}")
        if most is None:
            most = min(MAX_BUCKET_NBYTES, max(MIN_BUCKET_NBYTES, int(-(-total_nbytes // _BUCKETS_WANTED))))
        return cls(most, most if first is None else min(first, most))
