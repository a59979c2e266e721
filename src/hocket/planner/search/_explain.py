"""Why a plan: the winner against the runner-up in a paragraph, all ranked plans in a table, and what that rests on."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from hocket.units import format_bytes, format_flops, format_rate, format_time
from hocket.workload import Workload

from ..axes import AXES
from ..network import Constants, Network
from ..plan import SPLIT_REASON, Plan
from ..step import LEVEL, Prediction, untried
from ._preference import NEAR
from ._search import Search

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
    "interference": "collectives beside computation",
}


_FLOAT8 = (
    "float8 in linear layers (one scale a tensor, found anew each time) and where their sharded weights are gathered; "
    "attention, embeddings and output in bfloat16; planned, not carried out"
)


def _s(seconds: float) -> str:
    return format_time(seconds, 3)


def explain(found: Search) -> str:
    """One paragraph: what wins, what it costs, what comes second and why it is slower."""
    best = found.best
    limit = f" of {format_bytes(found.memory_limit, 3)}" if found.memory_limit else ""
    low, high = best.interval_s
    reached = f", {format_flops(best.flops_per_worker, 3)} a device" if best.flops else ""
    share = f"{best.mfu:.0%}" if best.mfu >= 0.01 else f"{100 * best.mfu:.1g}%"
    reached += f", {share} of its {best.mfu_format} peak" if best.mfu else ""
    lines = [
        f"{best.plan.describe()} on {best.workers} workers of {best.cluster} takes {_s(best.step_s)} a step "
        f"({_s(low)} to {_s(high)} with {LEVEL:.0%}; {best.throughput:.4g} samples/s{reached}) and "
        f"{format_bytes(best.memory.total, 3)}{limit} on the fullest worker."
    ]
    exposed = max(sorted(_WORDS.keys() - {"compute", "optimizer"}), key=lambda name: getattr(best.parts, name))
    worst = getattr(best.parts, exposed)
    if worst > 0:
        what = _WORDS[exposed]
        if exposed == "gather" and best.plan.shard != "parameters":
            what = "gathering the parameters that others updated"
        lines.append(
            f"Its largest overhead over one device is {what}: {_s(worst)}, {worst / best.step_s:.0%} of the step."
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
    faster = f"{gain:.1%} faster ({_WORDS[saved]} takes {_s(less[saved])} less)" if gain >= 5e-4 else "as fast"
    return (
        f"It is predicted to be {faster}. Predictions within {NEAR:.0%} of each other cannot be told apart, so the "
        "simplest of such plans is taken."
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
                f"{LEVEL:.0%} within": " to ".join(map(_s, one.interval_s)),
                "exposed": _s(parts.exposed),
                "idle": f"{parts.idle_share:.1%}",
                "memory": format_bytes(one.memory.total, 3),
                "why not": why,
            }
        )
    return rows


def with_reasons(found: Search) -> Plan:
    """Return the winner with what was predicted for it and a reason for each choice, to be written as a file."""
    best, plan = found.best, found.best.plan
    parts = best.parts
    predicted = {"step_s": best.step_s, "samples_per_s": best.throughput, "memory_bytes": round(best.memory.total)}
    if best.memory.process:
        predicted["resident_bytes"] = round(best.memory.resident)
    predicted |= dict(zip(("step_low_s", "step_high_s"), best.interval_s, strict=True))
    predicted |= {f"{name}_s": seconds for name, seconds in parts.rows() if seconds}
    within = f" of those that fit in {format_bytes(found.memory_limit, 3)}" if found.memory_limit else ""
    reasons = {"for": f"{best.workload}, batches of {best.batch}, {best.workers} workers of {best.cluster}"}
    reasons |= {one.field: one.reason(plan, parts) for one in AXES if one.name == "data" or one.degree(plan) > 1}
    if plan.shard != "none":
        reasons["shard"] = f"the least sharding within {NEAR:.0%} of the shortest step{within}"
    if plan.shard_degree:
        reasons["shard_degree"] = "parameters are gathered from fewer workers, for more memory"
    if plan.recompute:
        reasons["recompute"] = "without it the activations do not fit, or only smaller micro-batches do"
    if plan.split and plan.split != found.given_split:
        reasons["split"] = SPLIT_REASON
    if plan.bucket_bytes:
        least = f"leaves least exposed: {_s(parts.gradients)} of {_s(best.gradient_cost.seconds)}"
        late = plan.pipeline_parallel_degree > 1
        reasons["bucket_bytes"] = f"costs the least latency: gradients take {_s(parts.gradients)}" if late else least
    if found.others:
        second = found.others[0]
        reasons["plan"] = f"runner-up: {_words(second)}, {_slower(best, second)}"
    return dataclasses.replace(plan, predicted=predicted, reasons=reasons)


_PRODUCTS = {"matmul_share": "products", "float32_share": "float32 products", "attention32_share": "float32 attention"}
_KINDS = {
    "strided": "strided_share",
    "batch norm": "batch_norm_share",
    "depthwise": "depthwise_share",
    "recurrent": "recurrent_share",
}  # of kernels that reach less of the memory: the constants that say so
_KINDS_ARE = {
    "strided": "numbers in different orders",
    "batch norm": "channels not last, by what 16 bits would move",
    "depthwise": "convolutions with one window a channel, by four bytes for each product",
    "recurrent": "cuDNN's steps one after the other, each of which reads its weights; not measured here",
}
_CONSTANTS_OF = {
    **{row: {constant} for constant, row in _PRODUCTS.items()},
    "float8 products": {"matmul_share"},
    "fusion": {"fused_share"},
    "memory": {"memory_share"},
    **{kind: {constant} for kind, constant in _KINDS.items()},
    "inside hosts": {"inside_share"},
    "between hosts": {"network_share", "congestion"},
    "sharded parameters": {"fetch_share"},
    "overlap": {"overlap", "interference"},
    "jitter": {"jitter", "host_jitter"},
}  # which constants a row of `assumptions` tells
_NOT_OF_A_STEP = {"basis", "fitted_workers", "swept", "unmodelled", "seen"}
_NEUTRAL = {one.name: one.default for one in dataclasses.fields(Constants)} | {
    "collective_s": 0.0, "kernel_s": 0.0, "host_s": 0.0, "launch_s": 0.0, "update_host_s": 0.0,
}  # fmt: skip
_NOT_TIMED = ("embeddings", "priority", "compression")  # fields of plans that no formula knows


def assumptions(
    one: Prediction,
    network: Network,
    *,
    precision: str,
    given: Mapping[str, str] = MappingProxyType({}),
    workload: Workload | None = None,
) -> list[tuple[str, str, str]]:
    """Return what a prediction rests on: name, value, and whether it is given, measured, fitted, assumed or unknown.

    Args:
        one: The prediction.
        network: Of the cluster.
        precision: Of the workload's computation.
        given: Constants that the user has set, as they were written.
        workload: What is trained; which kernels are counted is left out if it is not given.
    """
    rows = []
    for name, value, basis in _assumptions(one, network, precision, workload):
        told = _CONSTANTS_OF.get(name, set())
        own = told & given.keys()
        rows.append((name, value, basis if not own else "given" if own == told else f"{basis}, in part given"))
    shown = {constant for name, *_ in rows for constant in _CONSTANTS_OF.get(name, ())}
    told = shown | given.keys() | _NOT_OF_A_STEP | ({"kernel_s"} if one.measured else set())  # launches are in times
    told |= set() if one.counted else {"host_s", "launch_s", "update_host_s"}
    others = [
        f"{name} {value}"
        for name, value in one.constants.table()
        if name not in told and getattr(one.constants, name) != _NEUTRAL[name]
    ]
    if others:
        rows.append(("other constants", ", ".join(others), one.constants.basis))
    if left := [name for name in _NOT_TIMED if getattr(one.plan, name) != getattr(Plan(), name)]:
        does = "do" if len(left) > 1 else "does"
        rows.append(("left out", f"what {' and '.join(left)} of the plan {does} to time and memory", "assumed"))
    return [*rows, *((name, value, "given") for name, value in given.items() if name not in shown)]


def _assumptions(
    one: Prediction, network: Network, precision: str, workload: Workload | None
) -> list[tuple[str, str, str]]:
    constants, plan = one.constants, one.plan
    basis = constants.basis
    inside_basis, between_basis = basis, basis
    if constants.swept > network.local:
        between_basis = "fitted"
    elif constants.swept:
        inside_basis = "fitted"
    unfitted = basis if basis == "measured" else "assumed"  # what no fit on published trainings tells
    parts = plan.micro_batches * plan.accumulate
    micro = -(-one.batch // (plan.data_parallel_degree * parts))
    copies = plan.data_parallel_degree
    own = f"{one.batch / copies:.4g} a {'worker' if copies == one.workers else 'copy of the model'}"
    rows = [
        ("batch", f"{one.batch} samples, {own}, {micro} at a time", "given"),
        ("precision", _FLOAT8 if precision == "float8" else precision, "given"),
    ]
    if workload and (unsure := workload.source.partition(", ")[2]):  # behind where its numbers are from
        rows.append(("workload", unsure, "assumed"))
    here = network.first(one.workers)
    for what in here.unlike.split():
        rows.append((what, f"those of {network.name} differ: all are taken for the least of them", "assumed"))
    if one.measured:
        beside = f", beside others on {one.disturbed:.1f} cores: far too long, perhaps" if one.disturbed else ""
        rows.append(("computation", f"each layer's times{beside}", "measured"))
        for name in untried(plan, constants):
            rows.append(
                (f"{name} axis", "no plan that was run to calibrate uses it: small models tell its costs", basis)
            )
        if one.beyond_peak:
            said = f"{format_flops(one.device_flops)} in {one.mfu_format} of {network.name}"
            rows.append(("peak", f"unknown: {said} is less than was measured, so there is no MFU", "measured"))
    elif here.flops:
        rows += _products(one, here, precision)
        fused = f"{constants.fused_share:.0%} of the traffic of kernels that only read and write is taken away"
        none = "none besides what the workload counts"
        if workload and workload.update_passes:
            none = "none: PyTorch's operators one by one, without torch.compile"
            rows.append(("update", f"{workload.update_passes:g} times the gradients read or written", "assumed"))
        elif workload:
            none = "none besides what the workload counts as one kernel, the optimizer among them"
        rows.append(("fusion", fused if constants.fused_share else none, "assumed"))
        moved = f"{constants.memory_share:.0%} of {format_rate(here.memory_Bps, 4)}"
        rows.append(
            ("memory", moved, basis)
            if here.memory_Bps
            else ("memory", "no rate is known, so it takes no time", "unknown")
        )
        if one.counted and one.on_processors:
            small = "steps of small models take from a third of what is said to one and a half times"
            rows.append(("caches", f"none: what they hold passes at the memory's rate; {small}", "unknown"))
        kinds = {each.kind for layer in workload.layers for each in layer.operations} if workload else set()
        for kind, constant in _KINDS.items():
            if kind in kinds and here.memory_Bps:
                share = getattr(constants, constant)
                value = f"{share:.0%} of {format_rate(here.memory_Bps, 4)} ({_KINDS_ARE[kind]})"
                rows.append((kind, value, "assumed"))
    if not one.memory_limit:
        rows.append(("memory of each", "no limit is known, so every plan fits", "unknown"))
    elif not network.sharers:
        rows.append(
            ("memory besides tensors", "none: driver, libraries' workspaces, the allocator's losses", "assumed")
        )
    if min(network.local, one.workers) > 1:
        rows.append(
            ("inside hosts", f"{constants.inside_share:.0%} of {format_rate(here.inside_Bps, 4)}", inside_basis)
        )
    if one.workers > network.local:
        rate = f"{constants.network_share:.0%} of {format_rate(here.host_Bps, 4)} a host"
        slower = f", {constants.congestion:.1%} slower for every doubling of hosts" if constants.congestion else ""
        rows.append(("between hosts", rate + slower, between_basis))
        if network.routed and not network.reached and not here.contention:
            wide = "as wide as the ports of hosts, and shared by no two flows"
            rows.append(("between switches", f"{wide}: routes of {one.workers} workers are not looked at", "assumed"))
    if plan.shard == "parameters":
        rows.append(("sharded parameters", f"fetched at {constants.fetch_share:.0%} of that", unfitted))
    if one.workers > 1:
        beside = f"; what runs beside computation takes {constants.interference:.0%} of its time from it"
        together = "gradients during back-propagation" if constants.overlap else "none"
        if plan.pipeline_parallel_degree > 1 and plan.shard != "parameters":
            together, beside = "none: gradients when all passes of a rank are over", ""
        rows.append(("overlap", together + beside, unfitted))
        jitter = f"{constants.jitter:.1%} of a rank's computation, {constants.host_jitter:.1%} of a host's"
        rows.append(("jitter", jitter, unfitted))
    return rows


def _products(one: Prediction, network: Network, precision: str) -> list[tuple[str, str, str]]:
    """Return rows of what products reach, in each number format in which some run."""
    constants = one.constants
    rows: list[tuple[str, str, str]] = []
    formats = {"bfloat16": 1.0} if precision == "float8" else dict(one.number_formats) or {precision: 1.0}
    said: set[str] = set()
    for name, part in formats.items():
        share, constant = constants.product_share(name, network.float32_flops > 0)
        peak, runs = network.peak(name)
        row = _PRODUCTS[constant] if constant not in said else f"{name} products"
        said.add(constant)
        rate = f"a third of {format_flops(network.tf32_flops)} in TF32" if runs == "3xtf32" else ""
        value = f"{share:.0%} of {rate or f'{format_flops(peak)} in {runs}'}"
        value += f", for {part:.0%} of the FLOPs" if part < 0.9995 else ""
        rows.append((row, value, constants.basis if constant == "matmul_share" else "assumed"))
    if precision == "float8":
        narrow = f"{constants.matmul_share:.0%} of {format_flops(network.float8_flops)}"
        rows.append(("float8 products", f"{narrow}, and casts by memory", "assumed"))
    return rows
