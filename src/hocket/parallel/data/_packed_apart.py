"""Finds out whether samples that are packed into one row meet in a model: one is run beside the others, and alone."""

from contextlib import suppress
from typing import Any

import torch

from hocket.comm import torch_adapter

from ..batches import Packed, undisturbed
from ._apart import ModelError, NoNoise, as_evaluated, run_apart
from ._forward_state import StateProbe
from ._tolerances import Tolerances

MEET = (
    "the loader's collate_fn packs samples into one row, each rank its own, and the model gives something else for a "
    "sample that has others before it ({}): it does not tell them apart, and on one device more of them would meet. "
    "Give it what keeps them apart (a mask, the sequence lengths that its attention takes), pad instead of packing, "
    "or pack in the data set, so that a sample is a whole row"
)
"""Format of what is wrong where ranks pack fewer samples than one device does."""


def packed_apart(module: torch.nn.Module, inputs: Any, other: Any, packed: Packed) -> str:
    """Return how what a model gives for the last sample of a row differs from what it gives for it alone; "" if equal.

    The model evaluates for it. Nothing is said of one that draws random choices, gives nothing as long as the row, or
    that the program has hooked.

    Args:
        module: The model.
        inputs: What it is called with: positional arguments, and those by name.
        other: The same, made of `packed.batch`.
        packed: The sample.
    """
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    if any(one._forward_hooks for one in module.modules()):
        return ""
    tolerances = Tolerances(module)
    row, alone = (inputs, other) if packed.alone else (other, inputs)
    with undisturbed([module]), torch_adapter.without_collectives(), tolerances.watching(), NoNoise():
        as_evaluated([module])
        probe = StateProbe([(module, {})], lambda _: True)
        with suppress(ModelError):
            mine, again = (run_apart(module, probe, row, number, 1).outputs for number in range(2))
            theirs = run_apart(module, probe, alone, 0, 1).outputs
            if all(tolerances.close(a, b, 1e-2) for a, b in zip(mine, again, strict=True)):
                for whole, one in zip(mine, theirs, strict=False):
                    end = _end(whole, one, packed) if whole.is_floating_point() else None
                    if end is not None and not tolerances.close(end, one):
                        off = (end - one).abs().max() / torch.maximum(end.abs().max(), one.abs().max())
                        return f"{float(off):.2g} off, relative"
    return ""


def _end(whole: torch.Tensor, one: torch.Tensor, packed: Packed) -> torch.Tensor | None:
    """Return the last sample's part of an output; None where it has no such part."""
    sizes = list(zip(whole.shape, one.shape, strict=False))
    longer = [i for i, pair in enumerate(sizes) if pair == (packed.whole, packed.length)]
    if whole.dim() != one.dim() or not longer or any(a != b for i, (a, b) in enumerate(sizes) if i not in longer):
        return None
    for dim in longer:
        whole = whole.narrow(dim, packed.whole - packed.length, packed.length)
    return whole
