"""What `hocket plan` and `hocket predict` are asked about: a workload, a cluster, a plan, and what is reached."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ._target import TARGET_HELP, TargetError, resolve_target

if TYPE_CHECKING:
    from hocket.cluster import Cluster
    from hocket.planner import Constants, Plan, Prediction
    from hocket.workload import Workload

MOST_SAMPLES = 10**12
"""Of a batch that is planned: far more than anybody has, and no number that arithmetic fails at."""
Target = Annotated[str, typer.Argument(help=f"What is trained: {TARGET_HELP}")]
Device = Annotated[str | None, typer.Option(help="Where a model is captured: cpu, cuda, or meta for no times.")]
Constant = Annotated[
    list[str] | None,
    typer.Option(help="What is reached, as jitter=0.02, instead of what the cluster says; may be given several times."),
]


@dataclasses.dataclass(frozen=True)
class Question:
    """What is to be predicted of what."""

    workload: Workload  # its products in the plan's precision
    cluster: Cluster
    plan: Plan  # the user's, or plain data parallelism
    constants: Constants
    own: Sequence[str]  # constants as the user has given them, "jitter=0.02"
    optimizer: str | None = None  # as the user has named it

    def assumed(self, one: Prediction) -> list[dict[str, str]]:
        """Return what a prediction rests on, constants of the user's that nothing else tells at the end."""
        from hocket.planner import Network, assumptions

        own = {name.strip(): value.strip() for name, _, value in (word.partition("=") for word in self.own)}
        work, network = self.workload, Network.of(self.cluster)
        found = assumptions(one, network, precision=work.precision, given=own, workload=work)
        found.insert(2, ("optimizer", _state_of(work, self.optimizer), "given" if self.optimizer else "assumed"))
        return [dict(zip(("what", "value", "basis"), row, strict=True)) for row in found]


def ask(
    target: str,
    cluster: Cluster,
    workers: int,
    *,
    device: str | None,
    plan: Plan | None,
    precision: str | None,
    constant: Sequence[str] | None,
    degrees: Sequence[int] = (2, 4, 8),  # see `hocket.workload.capture`
    optimizer: str | None = None,  # see `optimizer_named`
) -> Question:
    """Return what a command line asks about.

    Raises:
        TargetError: there is no such workload, constant or precision.
        WorkloadError: it cannot be captured, or not be planned in float8.
        PlanError: there is no such precision.
    """
    own = constant or []
    constants = _constants(cluster, own)
    sharers = _ranks_of_a_host(cluster, workers)
    workload = resolve_target(target, device=device, degrees=degrees, sharers=sharers, optimizer=optimizer)
    workload, taken = _with_plan(workload, plan, precision)
    return Question(workload, cluster, taken, constants, own, optimizer)


def _state_of(workload: Workload, optimizer: str | None) -> str:
    """Return what a workload's optimizer keeps, and the optimizer as far as it is known."""
    gradients = sum(layer.gradient_bytes for layer in workload.layers)
    state = sum(layer.optimizer_bytes for layer in workload.layers)
    kept = f"state of {state / max(1, gradients):.3g} times the gradients' bytes"
    usual = workload.source.startswith("captured") and state == 2 * gradients
    known = optimizer or ("Adam; --optimizer says another" if usual else "")
    return f"{kept} ({known})" if known else kept


def show_assumptions(rows: list[dict[str, str]]) -> None:
    """Print what a prediction rests on."""
    typer.echo("  taken:")
    for row in rows:
        typer.echo(f"    {row['what']:18} {row['value']} ({row['basis']})")


def _constants(cluster: Cluster, given: Sequence[str]) -> Constants:
    """Return what a cluster says is reached, with what the user says instead. Raises TargetError: that is no pair."""
    from hocket.planner import Constants

    pairs = [word.partition("=") for word in given]
    if wrong := next((word for word, pair in zip(given, pairs, strict=True) if not pair[1]), None):
        raise TargetError(f"--constant {wrong!r}: write NAME=VALUE, as jitter=0.02")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise TargetError(f"--constant {twice} is said twice; say it once")
    told = {name.strip(): {"true": True, "false": False}.get(text.strip(), text.strip()) for name, _, text in pairs}
    return Constants.of({**cluster.reached, **told})


def _with_plan(workload: Workload, plan: Plan | None, precision: str | None) -> tuple[Workload, Plan]:
    """Return the workload with products as a plan says, or in its own precision where none is asked for; and the plan.

    The plan is the user's, or plain data parallelism, in the precision that is asked for.

    Raises:
        TargetError: a precision is asked for that the workload is not in.
        WorkloadError: it cannot be planned in float8.
        PlanError: there is no such precision.
    """
    from hocket.planner import Plan

    plan = plan or Plan()
    if precision is not None:
        plan = dataclasses.replace(plan, precision=precision)  # type: ignore[arg-type]
    if plan.precision == "float8":
        return workload.in_float8(), plan
    if precision is not None and plan.precision != workload.precision:
        raise TargetError(f"--precision {plan.precision}: {workload.name} is in {workload.precision}: {_CAST}")
    return workload, plan


_CAST = "what it takes otherwise is not known; capture a model whose parameters are of that precision, or leave it out"


def _ranks_of_a_host(cluster: Cluster, workers: int) -> int:
    """Return how many of so many ranks share a host, at most."""
    hosts = Counter(cluster.host_of_rank(rank) for rank in range(min(workers, len(cluster.ranks))))
    return max((count for host, count in hosts.items() if host >= 0), default=1)
