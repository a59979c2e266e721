"""A recurrent layer as a GPU has it: one operator of PyTorch, whose kernels cuDNN launches step by step.

Of each layer and direction these are one product of all steps' inputs, and for each step one product with the recurrent
weights and one kernel for everything else (Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on
GPUs", 2016). They are counted one after the other, though directions, and the layers of a stack, may run beside each
other; and persistent kernels, which keep recurrent weights on the chip (float16, some sizes), are not counted as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._kernel import Float32Formats, Kernel, format_of, often

_aten = torch.ops.aten
RECURRENT = _aten._cudnn_rnn
"""The operator for which all kinds of recurrent layers stand on a GPU."""
RECURRENT_BACKWARD = _aten._cudnn_rnn_backward
_KINDS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # by cuDNN's numbers
# Of each hidden unit and step, numbers that cuDNN keeps for the backward pass: an LSTM's four gates, cell and output; 7
# of a GRU. What the last layer gives is kept by the operator, not by cuDNN. cuDNN itself has said 736,000,000 and
# 864,000,000 bytes of the same rows (pytorch/pytorch#2895). Parameters there are those of four layers of 320 units, of
# which 23 and 27 numbers are kept, as the ratio of the sizes is; rows (25,000) follow, and are not published. Of others
# nothing was found.
_KEPT = {"lstm": 6, "gru": 7}
_GATES = {"lstm": 4, "gru": 3}
_FLAT = (torch.float16, torch.float32, torch.float64)  # types in which torch lays a module's weights into one tensor


@dataclass(frozen=True)
class _Stack:
    """Layers and directions of one operator, and what goes through them."""

    kind: str  # of `_KINDS`
    matrices: list[list[int]]  # of each layer and direction: numbers in its weights of inputs, recurrent, of projection
    weights: int  # numbers in all weights
    tensors: int  # of weights
    hidden: int
    outputs: int  # that a direction gives: hidden units, or what they are projected to
    directions: int
    layers: int
    steps: int
    rows: int  # of all steps together
    first: int  # of the step with which a forward direction begins
    last: int  # of the last step, with which the other direction begins
    inputs: int  # numbers in a row
    dropout: float
    itemsize: int

    @classmethod
    def of(cls, packet: Any, args: Sequence[Any]) -> _Stack:
        given, weight, each, _, hx = args[:5]
        at = 6 if packet is RECURRENT else 10
        mode, hidden, projected, layers, batch_first, dropout, _, bidirectional, sizes = args[at : at + 9]
        if sizes:
            steps, rows, first, last = len(sizes), given.shape[0], sizes[0], sizes[-1]
        else:
            steps = given.shape[1 if batch_first else 0]
            first = last = hx.shape[1]
            rows = steps * first
        groups = [weight[at : at + each] for at in range(0, len(weight), each)]
        matrices = [[one.numel() for one in group if one.dim() == 2] for group in groups]
        return cls(
            _KINDS[mode], matrices, sum(one.numel() for one in weight), len(weight), hidden, projected or hidden,
            1 + bidirectional, layers, steps, rows, first, last, given.shape[-1], dropout, given.element_size(),
        )  # fmt: skip

    @property
    def gates(self) -> int:
        return _GATES.get(self.kind, 1)

    @property
    def runs(self) -> int:
        """How many times the steps are gone through."""
        return self.layers * self.directions

    def entering(self, number: int) -> int:
        """Numbers in a row that enters one of the runs."""
        return self.inputs if number < self.directions else self.directions * self.outputs

    def begin(self, number: int) -> int:
        """Rows with which one of the runs begins."""
        return self.last if number % self.directions else self.first

    @property
    def reserve_nbytes(self) -> int:
        """What cuDNN keeps; of dropout between layers outputs that are left, and a byte a number that says which."""
        numbers = self.runs * _KEPT.get(self.kind, 1) - (self.directions if self.kind in _KEPT else 0)
        left = (self.layers - 1) * self.directions * self.outputs if self.dropout else 0
        return self.rows * (numbers * self.hidden * self.itemsize + left * (self.itemsize + 1))

    @property
    def flops(self) -> int:
        """Of the forward pass: every row meets every matrix."""
        return 2 * self.rows * sum(map(sum, self.matrices))

    def flops_back(self, wanted: Sequence[bool]) -> int:
        """Return those of the backward pass that are for gradients of the inputs, of first states, and of weights."""
        found = self.flops * (1 + wanted[3])
        for number, (inputs, recurrent, *_) in enumerate(self.matrices):
            found -= 2 * self.rows * inputs if number < self.directions and not wanted[0] else 0
            found -= 2 * self.begin(number) * recurrent if not wanted[1] else 0
        return found


def recurrent_flops(packet: Any, args: Sequence[Any]) -> float:
    """Return the floating-point operations of the operator: those that its products need."""
    stack = _Stack.of(packet, args)
    return float(stack.flops if packet is RECURRENT else stack.flops_back(args[-1]))


def recurrent_kernels(packet: Any, args: Sequence[Any], formats: Float32Formats) -> list[Kernel]:
    """Return what the operator launches.

    Each step reads the recurrent weights again, as from memory: they may be in the second-level cache, which is faster.
    What the kernels of a step hand to each other is taken to be in that cache.
    """
    stack, given = _Stack.of(packet, args), args[0]
    number_format = format_of(given.dtype)
    number_format = formats.recurrent if number_format == "float32" else number_format
    nbytes = float(stack.weights * stack.itemsize)
    if packet is RECURRENT:
        found, copied = _forward(stack, number_format), [given]
        if args[3] is None:  # weights are copied into one tensor
            found.append(Kernel("others", moved=2 * nbytes, fixed=2 * nbytes, calls=stack.tensors))
    else:
        found, copied = _backward(stack, number_format, args[-1]), [given] if args[-1][3] else []
        if args[7] is not None:
            copied.append(args[7])
        else:  # it is made, of zeros
            found.append(Kernel("others", moved=float(args[6].numel() * stack.itemsize)))
        if args[-1][3]:  # gradients are added to zeros
            found.append(Kernel("others", moved=nbytes, fixed=nbytes))
    turn = args[_BATCH_FIRST[packet]] and given.dim() == 3
    turned = [one for one in copied if not (one.transpose(0, 1) if turn else one).is_contiguous()]
    return [*found, *(Kernel("strided", "strided", moved=2.0 * one.numel() * stack.itemsize) for one in turned)]


def _forward(stack: _Stack, number_format: str) -> list[Kernel]:
    found: list[Kernel] = []
    gates, outputs, kept = stack.gates * stack.hidden, stack.outputs, _KEPT.get(stack.kind, 1) * stack.hidden
    for number, (inputs, *steps) in enumerate(stack.matrices):
        moved = stack.rows * (stack.entering(number) + gates) + inputs
        found.append(_product(stack, number_format, inputs, moved, inputs, inner_calls=int(number > 0)))
        for matrix, numbers in zip(steps, (gates, outputs), strict=False):
            weights = stack.steps * matrix
            moved = weights + stack.rows * numbers
            found.append(_product(stack, number_format, matrix, moved, weights, calls=stack.steps))
        found.append(_each_step(stack, kept))
    between = stack.layers - 1 if stack.dropout else 0
    if between:
        moved = between * stack.rows * stack.directions * outputs * (2 * stack.itemsize + 1)
        found.append(Kernel("others", moved=float(moved), calls=between, inner_calls=between))
    return found


def _backward(stack: _Stack, number_format: str, wanted: Sequence[bool]) -> list[Kernel]:
    found: list[Kernel] = []
    gates, outputs, kept = stack.gates * stack.hidden, stack.outputs, _KEPT.get(stack.kind, 1) * stack.hidden
    rows = stack.rows
    for number, (inputs, *steps) in enumerate(stack.matrices):
        for place, matrix in enumerate(steps):
            weights, idle = stack.steps * matrix, 0 if wanted[1] or place else stack.begin(number)
            moved = weights + (rows * outputs if place else 0)
            found.append(_product(stack, number_format, matrix, moved, weights, calls=stack.steps, idle=idle))
        found.append(_each_step(stack, kept + outputs + gates))
        # Behind the steps: the gradient of what has entered, which is made in any case, and those of weights.
        entering = stack.entering(number)
        idle = rows if number < stack.directions and not wanted[0] else 0
        moved = rows * (gates + entering) + inputs
        found.append(_product(stack, number_format, inputs, moved, inputs, inner_calls=int(number > 0), idle=idle))
        if wanted[3]:
            for matrix, numbers in zip(
                (inputs, *steps), (gates + entering, gates + outputs, stack.hidden + outputs), strict=False
            ):
                moved = rows * numbers + matrix
                found.append(_product(stack, number_format, matrix, moved, matrix, inner_calls=1))
            found.append(Kernel("others", moved=float(rows * gates * stack.itemsize), inner_calls=1))  # of biases
    between = stack.layers - 1 if stack.dropout else 0
    if between:
        moved = between * rows * stack.directions * outputs * (2 * stack.itemsize + 1)
        found.append(Kernel("others", moved=float(moved), calls=between, inner_calls=between))
    return found


def _product(
    stack: _Stack, number_format: str, matrix: int, moved: int, weights: int, *,
    calls: int = 0, inner_calls: int = 0, idle: int = 0,
) -> Kernel:  # fmt: skip
    """Return the product of all rows with a matrix, in so many steps if `calls` is given; of `idle` rows it is unused.

    Of the numbers `moved` (read and written) so many are `weights`; `inner_calls` says of its one kernel, if it is one,
    how many are inside of the operator; `idle` rows are computed all the same.
    """
    full, nbytes = 2.0 * stack.rows * matrix, float(moved * stack.itemsize)
    name, kind = f"products{often(full, nbytes)}", ""
    if calls:
        name, kind, inner_calls = f"recurrent {name}", "recurrent", calls
    flops = full - 2.0 * idle * matrix
    fixed = float(weights * stack.itemsize)
    return Kernel(name, kind, number_format, flops, full, nbytes, fixed, calls or 1, inner_calls)


def _each_step(stack: _Stack, numbers: int) -> Kernel:
    """Return the kernels of all steps that do what is no product; they read or write so many numbers of a row."""
    moved = float(stack.rows * numbers * stack.itemsize)
    return Kernel("recurrent steps", "recurrent", moved=moved, calls=stack.steps, inner_calls=stack.steps)


_BATCH_FIRST = {RECURRENT: 10, RECURRENT_BACKWARD: 14}  # where the operators have that argument


def replace_recurrent(library: Any) -> None:
    """Have recurrent layers on the meta device be cuDNN's one operator, unless a program has switched cuDNN off."""
    if not torch.backends.cudnn.enabled:
        return
    library.impl("_cudnn_rnn", _made, "Meta", allow_override=True)  # torch's own has an empty reserve
    library.impl("_cudnn_rnn_backward", _made_back, "Meta")
    for number, kind in enumerate(_KINDS):
        library.impl(f"{kind}.input", partial(_whole, number), "AutogradMeta")
        library.impl(f"{kind}.data", partial(_packed, number), "AutogradMeta")


def _whole(
    number: int, given: Tensor, states: Any, weights: list[Tensor], biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rest = biases, layers, dropout, train, bidirectional
    return _one_operator(number, given, [], states, weights, *rest, batch_first=batch_first)


def _packed(number: int, given: Tensor, sizes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _one_operator(number, given, sizes.tolist(), *rest)


def _one_operator(
    number: int, given: Tensor, sizes: list[int], states: Any, weights: list[Tensor], biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, *, batch_first: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    hidden, cells = states if isinstance(states, list | tuple) else (states, None)
    size = (hidden if cells is None else cells).shape[2]
    projected = hidden.shape[2] if hidden.shape[2] != size else 0
    each = 2 + 2 * biases + bool(projected)
    # A module's own weights lie in one tensor; autocast makes such a one; others are copied into one.
    cast = any(map(torch.is_autocast_enabled, ("cuda", "cpu")))
    flat = cast or (given.dtype in _FLAT and all(one.is_leaf for one in weights))
    out = RECURRENT(
        given, weights, each, given.new_empty(0) if flat else None, hidden, cells, number, size, projected, layers,
        batch_first, dropout if train else 0.0, train or torch.is_grad_enabled(), bidirectional, sizes, None,
    )  # fmt: skip
    return tuple(out[: 2 if cells is None else 3])


def _made(*args: Any) -> tuple[Tensor, ...]:
    stack, given, (hidden, cells), train = _Stack.of(RECURRENT, args), args[0], args[4:6], args[12]
    width = stack.directions * stack.outputs
    if args[14]:
        out = given.new_empty(stack.rows, width)
    else:
        out = given.new_empty(stack.steps, stack.first, width)
        out = out.transpose(0, 1) if args[10] else out
    reserve = given.new_empty(stack.reserve_nbytes if train else 0, dtype=torch.uint8)
    cells = given.new_empty(0) if cells is None else cells.new_empty(cells.shape)
    return out, hidden.new_empty(hidden.shape), cells, reserve, given.new_empty(stack.weights if args[3] is None else 0)


def _made_back(*args: Any) -> tuple[Any, ...]:
    given, weights, hidden, cells = args[0], args[1], args[4], args[5]
    made = [None if one is None else one.new_empty(one.shape) for one in (given, hidden, cells)]
    return *made, [one.new_empty(one.shape) for one in weights] if args[-1][3] else []
