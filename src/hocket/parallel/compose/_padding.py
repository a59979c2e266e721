"""Refuses losses that depend on how far samples are padded, which each rank does for its own."""

import math
from collections.abc import Sequence

import torch

from hocket.planner import PlanError, PlanFinding
from hocket.workload.division import seed

from ..batches import Alone, BatchPart, LossForm, cut_fields, tensors_in, undisturbed
from ..data import LESS_RANDOM, PADDED, as_evaluated
from ._composition import Composition
from ._loss_judge import LossJudge
from ._precision import exactly

WHOLE = "take a plan that does not cut batches: tensor parallelism, a pipeline with micro_batches = 1, or one rank"
"""What to do where a loss is not that of its parts."""


def refuse_unlike_padding(
    composition: Composition,
    form: LossForm,
    part: BatchPart,
    alone: Alone | None,
    modules: Sequence[torch.nn.Module],
) -> None:
    """Refuse a loss that depends on how far samples are padded; a collective operation.

    Args:
        composition: What the plan has made of the model.
        form: Of the loss.
        part: This rank's part of a batch.
        alone: Some of its samples as a `BatchPart`, if others pad them to another length.
        modules: What a pass runs, which is left as it was.

    Raises:
        PlanError: the loss is another one.
    """
    data = composition.mesh["data"]
    pair = None if alone is None else _pair(part, alone)
    rows = data.from_all((_shapes(part), 0 if alone is None else alone.length, pair))
    lengths = {length for _, length, _ in rows} - {0}  # the loop may pad to one length
    shapes = [some for some, *_ in rows if some]
    found = next((pair for _, n, pair in rows if pair is not None and (not n or len(lengths) > 1)), None)
    if found is None:
        return
    device = next((t.device for t in tensors_in([part.inputs, part.target])), torch.device("cpu"))
    padded, shorter = (one.mapped(lambda tensor: tensor.to(device)) for one in found)
    if all(one == shapes[0] for one in shapes) and _is_longer(shorter, padded):
        return  # ranks have one length in this batch, none of which is padded
    judge, (_, quiet) = LossJudge(composition, form, padded, known=True), LESS_RANDOM[-1]

    def loss(number: int, part: BatchPart) -> float:
        with undisturbed(modules):
            seed(number)
            return composition.passes.measured(part.copied(), whole=True)[0].value

    off = 0.0
    with undisturbed(modules), exactly(), quiet():
        as_evaluated(modules)
        try:
            one, again, other = loss(0, padded), loss(1, padded), loss(0, shorter)
            if math.isfinite(one) and judge.close(one, again, 1e-2) and not judge.close(one, other):
                off = abs(one - other)
        except Exception:  # of a program that makes something else of the loader's batch
            off = 0.0
    if off := max(composition.mesh.whole.from_all(off)):
        rule = PADDED.format(f"the loss of some samples is {off:.2g} off")
        raise PlanError("the plan does not keep the loss of one process:", [PlanFinding("loss_fn", rule, WHOLE)])


def _pair(part: BatchPart, alone: Alone) -> tuple[BatchPart, BatchPart]:
    """Return some samples of a part as they are in it, and alone, for other ranks."""
    inputs, target = cut_fields(part.inputs, part.target, alone.begin, alone.end, part.samples)
    here = BatchPart(inputs, target, alone.end - alone.begin, alone.end - alone.begin)
    padded, shorter = (one.mapped(lambda tensor: tensor.detach().cpu()) for one in (here, alone.batch))
    return padded, shorter


def _shapes(part: BatchPart) -> list[torch.Size]:
    return [one.shape[1:] for one in tensors_in(part.inputs)] if part.samples else []


def _is_longer(one: BatchPart, other: BatchPart) -> bool:
    pairs = zip(_shapes(one), _shapes(other), strict=False)
    return any(m > n for a, b in pairs if len(a) == len(b) for m, n in zip(a, b, strict=True))
