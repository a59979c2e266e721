"""What torch's functions give, by their names: sizes, several tensors, numbers, or shapes that contents decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ..batches import trees as _trees

SIZES: Final = frozenset(("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes", "broadcast_shapes"))
CONTENTS: Final = {
    **{f"__{kind}__": kind for kind in ("bool", "int", "float", "index", "complex", "contains")},
    **{name: name for name in ("item", "is_nonzero", "equal", "allclose")},
}
ANSWERS: Final = frozenset(("bool", "contains", "is_nonzero", "equal", "allclose"))
OPENED: Final = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))  # what is in a tensor, beyond any check
SEVERAL: Final = frozenset(("unbind", "split", "chunk", "tensor_split", "split_with_sizes", "hsplit", "vsplit"))
RANDOM: Final = frozenset(("bernoulli", "multinomial", "normal", "poisson", "empty", "uniform_", "exponential_"))
_LOOSE: Final = frozenset((  # torch's tag `dynamic_output_shape` knows no argwhere and no packed sequences
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim", "bincount",
    "_pack_padded_sequence", "_pad_packed_sequence",
))  # fmt: skip
SHAPED_BY_FIRST: Final = frozenset((
    "__setitem__", "index_add", "index_copy", "index_fill", "index_put", "masked_fill", "masked_scatter", "scatter",
    "scatter_add", "scatter_reduce",
))  # fmt: skip


def is_loose(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the shape of what a call gives depends on numbers in tensors."""
    if name == "__getitem__":
        return _has_masks(args[1])
    if name == "repeat_interleave":  # as many times each, or as a tensor says
        repeats = kwargs["repeats"] if "repeats" in kwargs else args[min(1, len(args) - 1)]
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    if name == "where":  # of a condition alone: where it holds
        return len(args) + len(kwargs) == 1
    if name == "one_hot":  # as many classes as the largest number says
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0)
    if name == "tensor_split":
        return any(isinstance(one, torch.Tensor) for one in (*args[1:], *kwargs.values()))
    return name in _LOOSE


def _has_masks(index: Any) -> bool:
    return any(one.dtype in (torch.bool, torch.uint8) for one in _trees.tensors_in(index))
