"""Reduction operators as torch kernels that write into a given place."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

Kernel = Callable[..., torch.Tensor]  # kernel(a, b, out=c)

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
# torch has no arithmetic for these; sums, products and bits are those of the signed type of the same width.
_AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_KERNELS: dict[object, Kernel] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_NUMBERS = {int(op): index for index, op in enumerate(_KERNELS)}  # type: ignore[call-overload]
_BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})


class ReduceOperator(NamedTuple):
    """One operator on one element type."""

    number: int  # number that identifies the operator among ranks
    kernel: Kernel  # kernel that combines two: kernel(a, b, out=c)
    view: torch.dtype | None  # element type to compute with (another view of the same bits), or None
    factor: float | torch.Tensor | None  # factor of each rank's contribution (PREMUL_SUM), or None; see `share`
    average: bool  # whether to divide the result by the number of ranks
    engine_operator: ReduceOp.RedOpType  # the operator for an engine that has neither averages nor scaled sums

    def share(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what this rank contributes: `flat`, or for PREMUL_SUM its multiple, which leaves `flat` as it is."""
        return flat if self.factor is None else flat * self.factor

    def finish(self, result: torch.Tensor, world: int) -> None:
        """Divide `result` by `world` if this is an average; integers are rounded towards zero, as NCCL does."""
        if self.average:
            if result.is_complex():
                torch.view_as_real(result).div_(world)
            elif result.is_floating_point():
                result.div_(world)
            else:
                result.div_(world, rounding_mode="trunc")

    def deliver(self, total: torch.Tensor, target: torch.Tensor, world: int) -> None:
        """Write the result to `target`: `total`, or its average as `finish` would make it, in one pass."""
        if not self.average:
            target.copy_(total)
        elif total.is_complex():
            torch.div(torch.view_as_real(total), world, out=torch.view_as_real(target))
        elif total.is_floating_point():
            torch.div(total, world, out=target)
        else:
            torch.div(total, world, rounding_mode="trunc", out=target)


_plain: dict[tuple[int, torch.dtype], ReduceOperator] = {}


def reducer(op: Any, dtype: torch.dtype) -> ReduceOperator:
    """Return the kernel for `op` (a ReduceOp or one of its types) on `dtype`.

    Raises:
        TypeError: torch has no such arithmetic for `dtype`.
    """
    kind: Any = getattr(op, "op", op)
    key = int(kind), dtype  # torch's own hash and comparison of its enumerations are slow
    found = _plain.get(key)
    if found is not None:
        return found
    made = _make(op, kind, dtype)
    if made.factor is None:
        _plain[key] = made
    return made


def _make(op: Any, kind: Any, dtype: torch.dtype) -> ReduceOperator:
    view = None
    if dtype in _AS_SIGNED:
        fits = kind in _BITWISE or kind in (ReduceOp.SUM, ReduceOp.PRODUCT)
        view = _AS_SIGNED[dtype]
    elif dtype in _FLOATS:
        fits = kind not in _BITWISE
    elif dtype in _COMPLEX:
        fits = kind in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT)
    elif dtype == torch.bool:
        fits = kind not in (ReduceOp.AVG, ReduceOp.PREMUL_SUM)
    else:
        fits = dtype in _SIGNED and kind != ReduceOp.PREMUL_SUM
    if not fits or kind not in _KERNELS:
        name = str(kind).removeprefix("RedOpType.")
        raise TypeError(
            f"hocket cannot reduce {dtype} with {name}: torch has no such arithmetic; convert the tensor first"
        )
    factor = op.factor if kind == ReduceOp.PREMUL_SUM else None
    plain = ReduceOp.SUM if kind in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else kind
    return ReduceOperator(_NUMBERS[int(kind)], _KERNELS[kind], view, factor, kind == ReduceOp.AVG, plain)
