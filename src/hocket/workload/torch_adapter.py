"""Names that torch keeps to itself: which node of a backward pass runs, and which comes next in a forward pass."""

import torch


def next_node() -> int:
    """Return the number that the next node of autograd will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_that_runs() -> int | None:
    """Return the number of the node that a backward pass runs now; None outside of nodes."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())
