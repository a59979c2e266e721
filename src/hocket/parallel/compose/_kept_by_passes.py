"""What a model keeps from pass to pass in numbers and lists, which nobody makes alike on ranks and in passes."""

import itertools
from collections.abc import Sequence

import torch

from hocket.workload.division import seed

from ..batches import undisturbed
from ..data import StateProbe
from ._loss_judge import LossJudge

_KEPT = (
    "the model keeps something from pass to pass in an attribute or a list ({}), and passes have parts of a batch. "
    "Keep it in a buffer, which is averaged if it is a mean over samples, or change it after trainer.step."
)


def kept_by_passes(
    judge: LossJudge,
    modules: Sequence[torch.nn.Module],
    looked_at: Sequence[tuple[torch.nn.Module, dict[str, str]]],
    samples: int,
    *,
    several: bool,
) -> str:
    """Return how what the model keeps makes the loss of the same samples another; "" if it does not.

    Buffers, and attributes that are tensors, are looked at by themselves, or are the samples' own.

    Args:
        judge: Measures losses.
        modules: All that a pass may change.
        looked_at: The same, with names of their buffers.
        samples: How many there are to measure with.
        several: Whether a rank makes several passes a step.
    """

    def after(*places: int) -> float:
        with undisturbed(modules):
            probe, tensors = StateProbe(looked_at, lambda _: False), tensors_of(modules)
            seed(0)
            probe.left_by(lambda: [judge.measured(a, b) for a, b in itertools.pairwise(places)])
            for inner, names in tensors_of(modules).items():
                vars(inner).update({name: tensors[inner].get(name) for name in names})
            seed(0)
            return judge.measured(0, samples)[0].value

    cut = samples // 2
    try:
        never, whole, part, parts = after(), after(0, samples), after(0, cut), after(0, cut, samples)
    except Exception:  # a part of one sample, say, that the model does not take
        return ""
    if not judge.close(whole, part, 1e-2):
        return _KEPT.format(f"the loss of the same is {whole:.6g} after {samples} samples, {part:.6g} after {cut}")
    if several and not judge.close(whole, parts, 1e-2):
        return _KEPT.format(f"the loss of the same is {never:.6g}, {whole:.6g} after a pass, {parts:.6g} after two")
    return ""


def tensors_of(modules: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return the attributes of modules, and of those within, that are tensors."""
    every = {inner for module in modules for inner in module.modules()}
    return {one: {key: value for key, value in vars(one).items() if isinstance(value, torch.Tensor)} for one in every}
