"""What the verifier says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a schedule.

    Attributes:
        kind: "missing" (a contribution or a chunk does not arrive), "duplicate" (it arrives more than once), "race"
            (what arrives depends on the order of concurrent transfers), "wrong" (too many ranks to say which of them).
        breaks: Whether the contract is broken; a race whose outcome is not part of a result does not break it.
        endpoint: The rank or switch that holds the wrong value, as a number of the schedule.
        chunk: The first chunk that is wrong there.
        step: Step of the transfer to blame, repetitions counted; None if no transfer had any part in it.
        transfer: Its number within the step.
        message: All of it in one sentence.
    """

    kind: str
    breaks: bool
    endpoint: int
    chunk: int
    step: int | None
    transfer: int | None
    message: str

    def __str__(self) -> str:
        return self.message
