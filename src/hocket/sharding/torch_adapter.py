"""Names that torch keeps to itself and may move: where `torch.func` and torch.compile meet tensors of a program."""

from types import ModuleType
from typing import Any, Final

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.utils import checkpoint

outside_transforms = temporarily_clear_interpreter_stack
"""Opens a block in which no transform is under way."""


def of_transform(leaf: Any) -> bool:
    """Return whether one of `torch.func`'s transforms has made a tensor to take derivatives by."""
    return isinstance(leaf, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(leaf)


def in_backward() -> bool:
    """Return whether this thread is inside back-propagation now."""
    return torch._C._current_graph_task_id() != -1


def compiling() -> bool:
    """Return whether torch.compile is looking at a program."""
    return TracingContext.try_get() is not None


def _there(*named: tuple[ModuleType, str]) -> tuple[tuple[ModuleType, str], ...]:
    """Return those that this torch has; programs in tests of spatial parallelism fail where it has others instead."""
    return tuple((module, name) for module, name in named if hasattr(module, name))


CHECKPOINT_CHECKS: Final[dict[str, Any]] = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
"""By what torch.utils.checkpoint compares what it computes again, by name: functions of a tensor."""
ENTERING: Final = _there(
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (forward_ad, "make_dual"),
)
"""Functions through which a transform takes tensors in."""
LEAVING: Final = _there((vmap, "_remove_batch_dim"), (eager_transforms, "_unwrap_for_grad"))
"""Functions through which it gives them back."""
