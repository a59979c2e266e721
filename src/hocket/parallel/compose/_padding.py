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
    few: BatchPart,
    alone: Alone | None,
    modules: Sequence[torch.nn.Module],
) -> None:
    """Refuse a loss that depends on how far samples are padded; a collective operation.

    Args:
        composition: What the plan has made of the model.
        form: Of the loss.
        few: The first samples of rank 0's part of a batch, on every rank.
        alone: Some of this rank's samples as a `BatchPart`, if others pad them to another length.
        modules: What a pass runs, which is left as it was.

    Raises:
        PlanError: the loss is another one.
    """
    data = composition.mesh["data"]
    lengths = {*data.from_all(alone.length if alone is not None else 0)} - {0}
    alone = data.from_root(alone and alone._replace(batch=alone.batch.mapped(lambda one: one.cpu())))
    if alone is None or alone.end > few.samples or composition.mesh["pipeline"].size > 1:
        return
    if alone.length and len(lengths) < 2:  # the loop may pad to one length
        return
    inputs, target = cut_fields(few.inputs, few.target, alone.begin, alone.end, few.samples)
    padded = BatchPart(inputs, target, alone.end - alone.begin, few.samples)
    device = next((t.device for t in tensors_in([inputs, target])), torch.device("cpu"))
    shorter = alone.batch.mapped(lambda one: one.to(device))
    judge, (_, quiet) = LossJudge(composition, form, few, known=True), LESS_RANDOM[-1]

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
