"""The graph of automatic differentiation: its places, operators and leaves."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as _distributed
from torch.distributed import distributed_c10d as _c10d

_any: Any = _c10d
_public: Any = _distributed


def graph_marks(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return what tells the places of tensors in the graph of automatic differentiation, and keeps nothing alive."""
    return {one.grad_fn._sequence_nr() for one in tensors if one.grad_fn is not None}


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place; 0 for one of inference mode, of which torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def reaches(root: Any, marks: set[int]) -> bool:
    """Return whether a tensor, or a node of the graph, was computed from one of the tensors that the marks are of.

    Numbers grow as a graph is made, so that only what was computed after the first of them is looked at.
    """
    seen: set[Any] = set()
    todo = [getattr(root, "grad_fn", root)] if marks else []
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < min(marks):
            continue
        if node._sequence_nr() in marks:
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


def met(roots: Sequence[Any], marks: set[int]) -> set[int]:
    """Return those of the marks whose tensors these were computed from; see `reaches`."""
    seen, found = set[Any](), set[int]()
    todo = [getattr(root, "grad_fn", root) for root in roots] if marks else []
    first = min(marks, default=0)
    while todo:
        node = todo.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        found |= {node._sequence_nr()} & marks
        todo += [below for below, _ in node.next_functions]
    return found


def is_compiled(loss: torch.Tensor) -> bool:
    """Return whether torch.compile has made what is last in a tensor's graph, so that operators are hidden in it."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo and len(seen) < _NEAR_THE_END:
        node: Any = todo.pop(0)
        if node is None or node in seen:
            continue
        if "CompiledFunction" in node.name():
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


_NEAR_THE_END: Final = 64  # nodes of a graph: a loss is computed of fewer operators


def _nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of a tensor's graph, each once."""
    seen: set[Any] = set()
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [below for below, _ in node.next_functions]


def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors whose `.grad` a back-propagation from this one fills."""
    if tensor.is_leaf:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in _nodes(tensor) if hasattr(node, "variable")]


def readers(tensor: torch.Tensor, ids: set[int]) -> set[int]:
    """Return the places in a tensor's graph of the operators that read leaves of these identities."""

    def reads(node: Any) -> bool:
        return any(id(getattr(below, "variable", None)) in ids for below, _ in node.next_functions)

    return {node._sequence_nr() for node in _nodes(tensor) if reads(node)}


def result_sizes(node: Any) -> tuple[int, ...]:
    """Return the shape of what an operator in the graph has given, the first if there are several."""
    return tuple(node.variable.shape if hasattr(node, "variable") else node._input_metadata[0].shape)


def sums_over_ranks(node: Any, ranks: int) -> bool:
    """Return whether an operator in the graph is torch's own collective of so many ranks that sums their gradients."""
    name = node.name()
    summed = "all_reduce_default" in name or (name == "_AllReduceBackward" and node.op == _public.ReduceOp.SUM)
    if not summed and "_AllGather" not in name and "all_gather_into_tensor_default" not in name:
        return False
    group = _any._resolve_process_group(node.group_name) if hasattr(node, "group_name") else node.group
    return bool(_public.get_world_size(group) == ranks)
