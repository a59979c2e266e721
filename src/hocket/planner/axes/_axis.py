"""What an axis of parallelism is to everything that iterates over the table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hocket.workload import Workload

from .._findings import PlanFinding

if TYPE_CHECKING:
    from ..network import Network
    from ..plan import Plan
    from ..step import StepParts

Divides = Literal["batch", "layers", "tensors", "samples", "nothing"]


@dataclass(frozen=True)
class Axis:
    """One form of parallelism: a row of the table, `AXES`.

    Attributes:
        name: One word, by which the mesh, the report and a section of plan files know it.
        field: Plan's field with its degree, the number of ranks along it.
        divides: What of a step its ranks divide: the batch, the model's layers, each layer's tensors, or each sample.
        does: What becomes of a step, for the table in the docs.
        costs: What that costs, for the same table.
        settings: Further fields of Plan that belong to it, by their key in the axis' section of a plan file.
        replicates: Whether its ranks hold the same parameters: gradients are averaged over them, and what `shard` says
            is divided among them, too.
        priced_by_shares: Whether the layers of a workload say what one of its ranks does (`Share.axis`), from which
            time and memory of a step follow. False for what the planner's formulas know by themselves.
        alone: What goes with data parallelism and with no other axis, as the subject of that rule; "" for an axis that
            may meet every other.
        own_group: Whether its operations may run beside others of the same ranks, so that it needs a group of its own
            even where that holds all ranks.
        sampled: Whether the Trainer runs the model on a sample, to see how it can be divided.
        elementwise: Whether a rank updates parts of parameters, which not every optimizer can.
        describe: Returns what a plan says of it in a few words, as "2 tensor (sequence too)".
        rules: Yields what the plan combines with it and must not; asked only if the degree is above 1.
        refused: Yields what of a workload it cannot divide; asked only if the degree is above 1.
        considered: Tells whether the search tries a degree above 1 that divides the workers.
        reason: Returns why a plan that was chosen has this degree; "" for no reason.
    """

    name: str
    field: str
    divides: Divides
    does: str
    costs: str
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replicates: bool = False
    priced_by_shares: bool = False
    alone: str = ""
    own_group: bool = False
    sampled: bool = False
    elementwise: bool = False
    describe: Callable[[Plan], str] | None = None
    rules: Callable[[Plan], Iterable[PlanFinding]] = lambda plan: ()
    refused: Callable[[Plan, Workload], Iterable[PlanFinding]] = lambda plan, workload: ()
    considered: Callable[[Workload, Network, int], bool] = lambda workload, network, degree: False
    reason: Callable[[Plan, StepParts], str] = lambda plan, parts: ""

    def degree(self, plan: Plan) -> int:
        """Return how many ranks a plan has along it."""
        degree: int = getattr(plan, self.field)
        return degree

    def words(self, plan: Plan) -> str:
        """Return what a plan says of it in a few words."""
        return self.describe(plan) if self.describe else f"{self.degree(plan)} {self.name}"

    @property
    def fields(self) -> dict[str, str]:
        """Plan's fields by their key in the axis' section of a plan file."""
        return {"degree": self.field, **self.settings}
