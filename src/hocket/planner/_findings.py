"""What is wrong with a plan: findings, each with the rule that is broken and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """One broken rule.

    Attributes:
        field: the plan's field that the rule is about.
        rule: what must hold, and what was found instead.
        remedy: what to change.
    """

    field: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}; {self.remedy}"


class PlanError(ValueError):
    """A plan cannot be read, or cannot be carried out.

    Args:
        message: what was being done.
        findings: the broken rules, if it could be read.
    """

    def __init__(self, message: str, findings: Sequence[PlanFinding] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join([message, *(f"  {finding}" for finding in self.findings)]))
