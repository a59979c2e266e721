"""A run against its plan: predicted and measured per part, with the error of each."""

from dataclasses import dataclass

from hocket.timeline import Timeline

from .._findings import PlanError, PlanFinding
from ..axes import inner, product
from ._plan import Plan

PLANNED_PARTS: dict[str, tuple[str, ...]] = {
    "computation": ("compute_s", "recompute_s", "optimizer_s", "crowding_s", "overhead_s", "interference_s"),
    "exposed communication": ("tensor_s", "messages_s", "gather_s", "gradients_s"),
    "idle": ("bubble_s", "straggle_s"),
}
"""What a plan file says (`with_reasons`) of each part of a step that a timeline can show."""


@dataclass(frozen=True)
class PlanCheck:
    """Seconds of a step, means over ranks.

    Attributes:
        rows: Part, predicted and measured; the whole step first. What was not predicted has nan.
        collectives: Name and measured seconds of each kind of communication, the longest first.
    """

    rows: tuple[tuple[str, float, float], ...]
    collectives: tuple[tuple[str, float], ...]

    @property
    def error(self) -> float:
        """Of the step: predicted by measured, less 1."""
        _, predicted, measured = self.rows[0]
        return predicted / measured - 1

    def __str__(self) -> str:
        lines = [f"{'':24} {'predicted':>12} {'measured':>12} {'error':>8}"]
        for part, predicted, measured in self.rows:
            # An error of a part that hardly exists says nothing; it is given by the step then.
            error = f"{predicted / measured - 1:+.1%}" if measured > 0.01 * self.rows[0][2] else ""
            lines.append(f"{part:24} {predicted * 1e3:9.3f} ms {measured * 1e3:9.3f} ms {error:>8}")
        lines += [f"  {name[:22]:22} {'':>12} {seconds * 1e3:9.3f} ms" for name, seconds in self.collectives]
        return "\n".join(lines)


def check_run(plan: Plan, timeline: Timeline, *, steps: int = 1) -> PlanCheck:
    """Compare what a plan predicts of a step with what a timeline shows of some.

    Args:
        plan: With `predicted`, as `with_reasons` writes it.
        timeline: Of `steps` steps; spans of kind "compute" and of kinds of communication.
        steps: How many the timeline holds.

    Raises:
        PlanError: the plan predicts nothing, or the timeline is empty or of other ranks than the plan's.
    """
    if "step_s" not in plan.predicted:
        rule = "the plan says nothing of how long a step takes"
        raise PlanError(
            "nothing can be compared:", [PlanFinding("predicted", rule, "make it with `hocket plan -o FILE`")]
        )
    ranks = timeline.ranks
    if not ranks or steps < 1:
        raise PlanError(f"nothing can be compared: {timeline.name} holds {len(timeline.spans)} spans of {steps} steps")
    inside = product(plan, *inner())
    whole = len(ranks) > 1  # of one rank it may be that rank's part
    if whole and (len(ranks) % inside or plan.data_parallel_degree not in (-1, len(ranks) // inside)):
        rule = f"{timeline.name} is of {len(ranks)} ranks, which {plan.describe()} does not make"
        raise PlanError("nothing can be compared:", [PlanFinding("timeline", rule, "give the plan of that run")])
    if all(span.kind != "compute" for span in timeline.spans):
        rule = f"{timeline.name} has no spans of computation, so what it tells is of other things"
        remedy = "`hocket explain RUN` says it of a run; here give a trace of `hocket train` or Trainer.timeline()"
        raise PlanError("nothing can be compared:", [PlanFinding("timeline", rule, remedy)])
    each = len(ranks) * steps
    kinds = {span.kind for span in timeline.spans} - {"compute"}
    step = timeline.seconds / steps
    compute = sum(timeline.busy_s(rank, "compute") for rank in ranks) / each
    busy = sum(timeline.busy_s(rank) for rank in ranks) / each
    measured = {"step": step, "computation": compute, "exposed communication": busy - compute, "idle": step - busy}
    rows = tuple(
        (part, sum(float(plan.predicted.get(name, 0.0)) for name in names), measured[part])
        for part, names in {"step": ("step_s",), **PLANNED_PARTS}.items()
    )
    by_name: dict[str, float] = {}
    for span in timeline.spans:
        if span.kind in kinds:
            by_name[span.name] = by_name.get(span.name, 0.0) + span.seconds / each
    longest = sorted(by_name.items(), key=lambda pair: (-pair[1], pair[0]))[:8]
    return PlanCheck(rows, tuple(longest))
