"""Why a plan: the winner against the runner-up in a paragraph, and all ranked plans in a table."""

import dataclasses

from hocket.units import format_bytes, format_time

from ._plan import Plan
from ._preference import NEAR
from ._search import Search
from ._time import Prediction
from .axes import AXES

_WORDS = {
    "compute": "computation",
    "recompute": "computing again",
    "tensor": "exchanges between workers that share layers",
    "messages": "sending messages between stages",
    "bubble": "waiting for the pipeline",
    "gather": "gathering sharded parameters",
    "gradients": "reducing gradients",
    "optimizer": "the optimizer",
    "straggle": "waiting for the slowest",
}


def _s(seconds: float) -> str:
    return format_time(seconds, 3)


def explain(found: Search) -> str:
    """One paragraph: what wins, what it costs, what comes second and why it is slower."""
    best = found.best
    limit = f" of {format_bytes(found.memory_limit, 3)}" if found.memory_limit else ""
    lines = [
        f"{best.plan.describe()} on {best.workers} workers of {best.cluster} takes {_s(best.step_s)} a step "
        f"({best.throughput:.4g} samples/s) and {format_bytes(best.memory.total, 3)}{limit} on the fullest worker."
    ]
    exposed = max(_WORDS.keys() - {"compute", "optimizer"}, key=lambda name: getattr(best.parts, name))
    worst = getattr(best.parts, exposed)
    if worst > 0:
        lines.append(
            f"Its largest overhead over one device is {_WORDS[exposed]}: {_s(worst)}, "
            f"{worst / best.step_s:.0%} of the step."
        )
    if found.others:
        second = found.others[0]
        said = _chosen_for_being_simple(best, second) if found.choice else f"It is {_slower(best, second)}."
        lines.append(f"The runner-up is {_words(second)}. {said}")
    if found.too_large:
        large = found.too_large[0]
        lines.append(
            f"{large.plan.describe()} would take {_s(large.step_s)}, but needs {format_bytes(large.memory.total, 3)}."
        )
    lines.append(f"The search considered {found.considered} plans and predicted {found.timed} step times.")
    return " ".join(lines)


def _chosen_for_being_simple(best: Prediction, fastest: Prediction) -> str:
    less = {name: getattr(best.parts, name) - getattr(fastest.parts, name) for name in _WORDS}
    saved = max(less, key=lambda name: less[name])
    gain = 1 - fastest.step_s / best.step_s
    return (
        f"It is predicted to be {gain:.1%} faster ({_WORDS[saved]} takes {_s(less[saved])} less). Predictions within "
        f"{NEAR:.0%} of each other cannot be told apart, so the simplest of such plans is taken."
    )


def _slower(best: Prediction, other: Prediction) -> str:
    more = other.step_s / best.step_s - 1
    if more < 0:
        return f"{-more:.1%} faster, which is within the prediction's error, and less simple"
    gains = {name: getattr(other.parts, name) - getattr(best.parts, name) for name in _WORDS}
    worse = max(gains, key=lambda name: gains[name])
    better = min(gains, key=lambda name: gains[name])
    text = f"{more:.1%} slower"
    if gains[worse] > 0:
        text += f": {_WORDS[worse]} takes {_s(gains[worse])} more"
        if gains[better] < -0.02 * best.step_s:
            text += f", {_WORDS[better]} {_s(-gains[better])} less"
    return text


def _words(one: Prediction) -> str:
    micro = one.plan.micro_batches * one.plan.accumulate
    words = one.plan.describe()
    if micro > 1 and one.plan.pipeline_parallel_degree == 1:
        words += f", {micro} parts"
    if one.plan.recompute:
        words += f", {one.plan.recompute_part} again"
    return words


def plan_rows(found: Search) -> list[dict[str, str]]:
    """Return a row a plan, the winner first, by column: plan, step, exposed communication, idle, memory, why not."""
    rows = []
    best = found.best
    for one in (best, *found.others, *found.too_large):
        parts = one.parts
        if one is best:
            why = "chosen"
        elif not one.fits:
            why = f"needs {format_bytes(one.memory.total, 3)} of {format_bytes(found.memory_limit, 3)}"
        else:
            why = _slower(best, one)
        rows.append(
            {
                "plan": _words(one),
                "step": _s(one.step_s),
                "exposed": _s(parts.exposed),
                "idle": f"{(parts.bubble + parts.straggle) / one.step_s:.1%}",
                "memory": format_bytes(one.memory.total, 3),
                "why not": why,
            }
        )
    return rows


def with_reasons(found: Search) -> Plan:
    """Return the winner with what was predicted for it and a reason for each choice, to be written as a file."""
    best, plan = found.best, found.best.plan
    parts = best.parts
    predicted = {"step_s": best.step_s, "samples_per_s": best.throughput, "memory_bytes": best.memory.total}
    predicted |= {f"{name}_s": seconds for name, seconds in parts.rows() if seconds}
    within = f" of those that fit in {format_bytes(found.memory_limit, 3)}" if found.memory_limit else ""
    reasons = {one.field: one.reason(plan, parts) for one in AXES if one.name == "data" or one.degree(plan) > 1}
    if plan.shard != "none":
        reasons["shard"] = f"the least sharding within {NEAR:.0%} of the shortest step{within}"
    if plan.recompute:
        reasons["recompute"] = "without it the activations do not fit, or only smaller micro-batches do"
    if plan.bucket_bytes:
        reasons["bucket_bytes"] = f"leaves least exposed: {_s(parts.gradients)} of {_s(best.gradient_cost.seconds)}"
    if found.others:
        second = found.others[0]
        reasons["plan"] = f"runner-up: {_words(second)}, {_slower(best, second)}"
    return dataclasses.replace(plan, predicted=predicted, reasons=reasons)
