"""What compression has saved, what it has cost, and whether it pays."""

from dataclasses import dataclass, field
from typing import Any

from ._compressor import BucketJob, Compressor, CountingGroup
from ._measure import LinkTimes

_MEASURED_FIRST, _MEASURED_EVERY = 4, 32
_EVEN = 0.02  # of the time without compression: less than that is no difference


@dataclass(slots=True)
class _Bucket:
    """Of one bucket: bytes of its gradients, how often it went, and the error when last measured."""

    nbytes: int
    count: int = 0
    error: float | None = None


@dataclass(slots=True)
class CompressionTally:
    """Counts while training goes on."""

    steps: int = 0  # reductions of all gradients
    plain_nbytes: float = 0.0  # bytes that a rank would have sent of the gradients as they are
    gradient_nbytes: int = 0  # bytes of the gradients themselves
    busy_s: float = 0.0  # seconds for encoding and decoding
    scattered: bool = False  # whether each rank needs its part only
    buckets: dict[int, _Bucket] = field(default_factory=dict)  # counts of each bucket, by number

    @property
    def measures(self) -> bool:
        """Whether this step's error is to be found out: it takes as long as decoding once more."""
        return self.steps < _MEASURED_FIRST or self.steps % _MEASURED_EVERY == 0

    def add(self, number: int, job: BucketJob, busy_s: float) -> None:
        """Count an exchange that is over."""
        nbytes = job.flat.numel() * job.flat.element_size()
        n = job.link.size
        self.scattered = job.scattered
        self.gradient_nbytes += nbytes
        self.plain_nbytes += (1 if job.scattered else 2) * (n - 1) / n * nbytes
        self.busy_s += busy_s
        bucket = self.buckets.setdefault(number, _Bucket(nbytes))
        bucket.count += 1
        if job.error is not None:
            bucket.error = job.error

    def report(
        self, method: Compressor, text: str, link: CountingGroup, times: LinkTimes | None, held_nbytes: int
    ) -> dict[str, Any]:
        """JSON values; see `Compression.report`."""
        steps = max(1, self.steps)
        sizes = [bucket.nbytes for bucket in self.buckets.values()]
        found: dict[str, Any] = {
            "method": text,
            "serially_equivalent": False,
            "unbiased": method.unbiased,
            "error_feedback": method.feedback,
            "steps": self.steps,
            "gradient_nbytes_per_step": self.gradient_nbytes / steps,
            "sent_nbytes_per_step": link.sent_nbytes / steps,
            "uncompressed_sent_nbytes_per_step": self.plain_nbytes / steps,
            "saved_nbytes": self.plain_nbytes - link.sent_nbytes,
            "encode_decode_s_per_step": self.busy_s / steps,
            "kept_nbytes": held_nbytes,
            "relative_error": [
                {"bucket": number, "nbytes": bucket.nbytes, "relative_error": bucket.error}
                for number, bucket in sorted(self.buckets.items())
            ],
            "link": None,
        }
        if times is not None and sizes:
            plain_s = sum(times.plain.seconds(nbytes) for nbytes in sizes)
            compressed_s = sum(times.compressed.seconds(nbytes) for nbytes in sizes)
            found["link"] = {
                "uncompressed_s_per_step": plain_s,
                "compressed_s_per_step": compressed_s,
                "saved_s_per_step": plain_s - compressed_s,
            }
        found["verdict"] = _verdict(found, text)
        return found


def _verdict(found: dict[str, Any], text: str) -> str:
    if found["link"] is None:
        return f"Whether {text} pays is measured in the second step."
    plain_s, compressed_s = (found["link"][f"{kind}_s_per_step"] for kind in ("uncompressed", "compressed"))
    sent, plain = found["sent_nbytes_per_step"], found["uncompressed_sent_nbytes_per_step"]
    facts = (
        f"with it a step's gradients take {compressed_s * 1e3:.3g} ms (encoding and decoding included) instead of "
        f"{plain_s * 1e3:.3g} ms, and {sent / 1e6:.3g} MB leave each rank instead of {plain / 1e6:.3g} MB"
    )
    errors = [one["relative_error"] for one in found["relative_error"] if one["relative_error"] is not None]
    lost = f"; the relative error of what is sent is {max(errors):.2g} at most" if errors else ""
    if abs(plain_s - compressed_s) <= _EVEN * plain_s:
        return f"{text} makes no difference in time on this link: {facts}{lost}."
    if compressed_s > plain_s:
        return f"{text} does not pay on this link: {facts}{lost}. Leave compression out."
    hidden = "of which back-propagation may have hidden some"
    return f"{text} pays on this link: {facts}; it saves {(plain_s - compressed_s) * 1e3:.3g} ms, {hidden}{lost}."
