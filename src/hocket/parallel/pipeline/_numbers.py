"""What a step checks of numbers: that a batch gives the answers by which Python went through the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OtherBranchError(RuntimeError):
    """A batch takes another way through the model than the sample that it was split with."""

    def __init__(self, check: SameAnswer, value: Any) -> None:
        super().__init__(
            f"{check.what} gave {check.allowed[0]!r} for the sample that the model was split with and gives {value!r} "
            "for this batch, so its code would take another way. Give a sample whose sizes are those of the batches "
            "(Trainer(sample=)), pad batches to the same sizes, or keep what depends on them in one submodule; where "
            "they are numbers in the data and no sizes (which expert takes how many tokens), say "
            "pipeline_parallel_degree = 1"
        )
        self.check, self.value = check, value


class SameAnswer:
    """A step: checks that code which was followed once holds for this batch too, as `how` gives the same answer."""

    __name__ = "check"

    def __init__(self, how: Callable[..., Any], answer: Any, what: str) -> None:
        self.how, self.what = how, what
        self.allowed = [answer]  # answers by which the code gives the same results

    def __call__(self, *values: Any) -> None:
        """Check a batch; OtherBranchError if it gives another answer."""
        value = self.how(*values)
        if value not in self.allowed:
            raise OtherBranchError(self, value)
