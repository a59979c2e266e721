"""What an optimizer keeps of each parameter, and how much its update reads and writes: seen in steps of made-up ones.

They are taken on the meta device, one parameter of every shape, and in memory where an optimizer asks for values there.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.sharding import leaves

from ._share import WorkloadError

OptimizerMaker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of parameters: a class of torch.optim, or a function that calls one."""

_STATE = {"sgd": 0, "momentum": 1, "adam": 2}  # tensors beside each parameter, of its type
# What torch's optimizers read and write on a GPU, where each step of their formula is a kernel for all tensors
# (`foreach`, the default): AdamW's are 2 for the decay, 3 + 2 + 3 for both moments, 2 + 2 + 2 for the root, its divisor
# and epsilon, 4 for the parameters; momentum's 2 + 3 + 3; plain SGD's 3.
_PASSES = {"sgd": 3, "momentum": 8, "adam": 20}

_Form = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Update:
    """An optimizer as a workload counts it.

    Attributes:
        passes: How many times as much as the gradients have its kernels read and write.
        states: Of every form of parameter the bytes of its state.
        make: It, of some parameters.
    """

    passes: float
    states: dict[_Form, int]
    make: OptimizerMaker

    @classmethod
    def of(cls, optimizer: str | OptimizerMaker, parameters: Iterable[nn.Parameter]) -> "Update":
        """Return it for a model's parameters, of which those count that are trained.

        Raises:
            WorkloadError: no such optimizer is known, or it takes no step on such parameters.
        """
        forms = Counter((one.shape, one.dtype) for one in parameters if one.requires_grad)
        if callable(optimizer):
            return cls._seen(optimizer, forms)
        if optimizer not in _STATE:
            known = ", ".join(_STATE)
            raise WorkloadError(
                f"capture: optimizer {optimizer!r} is not one of {known}, and no function that makes one"
            )
        count, passes = _STATE[optimizer], _PASSES[optimizer]
        states = {form: count * form[0].numel() * form[1].itemsize for form in forms}
        return cls(passes, states, _NAMED[optimizer])

    @classmethod
    def _seen(cls, make: OptimizerMaker, forms: Counter[_Form]) -> "Update":
        states: dict[_Form, int] = {}
        moved = gradients = 0.0
        for form, count in forms.items():
            nbytes, traffic = _step(make, form)
            states[form] = nbytes
            moved += count * traffic
            gradients += count * form[0].numel() * form[1].itemsize
        return cls(round(moved / gradients, 2) if gradients else 0.0, states, make)

    def state_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's state."""
        return self.states[parameter.shape, parameter.dtype] if parameter.requires_grad else 0


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


_NAMED: dict[str, OptimizerMaker] = {"sgd": _sgd, "momentum": _momentum, "adam": torch.optim.Adam}


def optimizer_maker(kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> OptimizerMaker:
    """Return a function that makes optimizers of a class with settings, and with a learning rate if it wants one.

    Raises:
        WorkloadError: the class has no such setting.
    """
    known = inspect.signature(kind).parameters
    more = any(one.kind is one.VAR_KEYWORD for one in known.values())
    if strange := [name for name in settings if name not in known and not more]:
        raise WorkloadError(
            f"{getattr(kind, '__name__', kind)} has no setting {strange[0]!r}; it has {', '.join(known)}"
        )
    if "lr" in known and known["lr"].default in (inspect.Parameter.empty, None):
        settings = {"lr": 1e-3, **settings}
    return lambda parameters: kind(parameters, **settings)


def _step(make: OptimizerMaker, form: _Form) -> tuple[int, float]:
    """Return the bytes of the state of one parameter, and of what a step reads and writes."""
    said = ""
    for device in ("meta", "cpu"):
        parameter = nn.Parameter(torch.empty(form[0], dtype=form[1], device=device))
        if device == "cpu":
            parameter.data.zero_()
        parameter.grad = torch.zeros_like(parameter)
        try:
            made = make([parameter])
            for group in made.param_groups:  # as on a GPU, where it is the default
                if "foreach" in group and group["foreach"] is None:
                    group["foreach"] = True
            made.step()  # the first one makes the state
            with _Traffic() as traffic:
                made.step()
        except Exception as error:  # as many ways as there are optimizers
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        kept = [one for state in made.state.values() for name, one in state.items() if name != "step"]
        tensors = [one for one in leaves(kept) if isinstance(one, Tensor) and one.dim() >= min(1, parameter.dim())]
        return sum(map(_nbytes, tensors)), traffic.nbytes
    raise WorkloadError(f"the optimizer takes no step on a parameter of shape {tuple(form[0])}: {said}")


def _nbytes(one: Tensor) -> int:
    """Return the bytes of a tensor; of one that is made of others, as those in 8 bits are, of these."""
    if hasattr(one, "__tensor_flatten__"):
        return sum(_nbytes(getattr(one, name)) for name in one.__tensor_flatten__()[0])
    return one.numel() * one.element_size()


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            written: Any = out
            if func.overloadpacket.__name__.startswith("_foreach") and out is None:
                written = args[0]  # in place
            both = leaves((args, kwargs or {})), leaves(written)
            self.nbytes += sum(_nbytes(one) for part in both for one in part if isinstance(one, Tensor))
        return out
