"""What an optimizer keeps of each parameter, what its update reads and writes, and what it makes for a moment.

All is seen in steps of made-up parameters. They are taken on the meta device, one parameter of every shape, and in
memory where an optimizer asks for values there. Whether it updates all parameters at a time, and so makes values of
all, or one after the other, is seen in steps of several small ones.
"""

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.sharding import leaves, strided_parts

from ._share import WorkloadError

OptimizerMaker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of parameters: a class of torch.optim, or a function that calls one."""

_STATE = {"sgd": 0, "momentum": 1, "adam": 2}  # tensors beside each parameter, of its type
# What torch's optimizers read and write on a GPU, where each step of their formula is a kernel for all tensors
# (`foreach`, the default): AdamW's are 2 for the decay, 3 + 2 + 3 for both moments, 2 + 2 + 2 for the root, its divisor
# and epsilon, 4 for the parameters; momentum's 2 + 3 + 3; plain SGD's 3.
_PASSES = {"sgd": 3, "momentum": 8, "adam": 20}
_VALUES = {"sgd": 0, "momentum": 0, "adam": 1}  # that these make of each gradient for a moment: Adam's divisor

_Form = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Update:
    """An optimizer as a workload counts it.

    Attributes:
        passes: How many times as much as the gradients have its kernels read and write.
        states: Of every form of parameter the bytes of its state.
        make: It, of some parameters.
        values: How many times as much as the gradients are its values for a moment, as far as there are those of all
            parameters at a time.
        singles: Of every form of parameter the bytes of those that there are of one parameter at a time, and of what of
            them is there yet while it makes those of the next one.
    """

    passes: float
    states: dict[_Form, int]
    make: OptimizerMaker
    values: float
    singles: dict[_Form, tuple[float, float]]

    @classmethod
    def of(cls, optimizer: str | OptimizerMaker, parameters: Iterable[nn.Parameter]) -> "Update":
        """Return it for a model's parameters, of which those count that are trained.

        Raises:
            WorkloadError: no such optimizer is known, or it takes no step on such parameters.
        """
        forms = Counter((one.shape, one.dtype) for one in parameters if one.requires_grad)
        if callable(optimizer):
            return cls._seen(optimizer, forms)
        if isinstance(optimizer, torch.optim.Optimizer):  # whose text is all of its groups
            remedy = "give its class, or a function that makes one of parameters"
            raise WorkloadError(f"capture: optimizer is one of type {type(optimizer).__name__}; {remedy}")
        if optimizer not in _STATE:
            known = ", ".join(_STATE)
            raise WorkloadError(
                f"capture: optimizer {optimizer!r} is not one of {known}, and no function that makes one"
            )
        count, passes = _STATE[optimizer], _PASSES[optimizer]
        states = {form: count * form[0].numel() * form[1].itemsize for form in forms}
        return cls(passes, states, _NAMED[optimizer], _VALUES[optimizer], dict.fromkeys(forms, (0.0, 0.0)))

    @classmethod
    def _seen(cls, make: OptimizerMaker, forms: Counter[_Form]) -> "Update":
        states: dict[_Form, int] = {}
        singles: dict[_Form, tuple[float, float]] = {}
        ways: dict[tuple[int, torch.dtype], tuple[float, float, float]] = {}
        moved = together = gradients = 0.0
        for form, count in forms.items():
            seen = _step(make, form)
            way = len(form[0]), form[1]
            if seen.most and way not in ways:
                ways[way] = _parts_at_a_time(make, form)
            of_all, of_one, left = ways.get(way, (0.0, 0.0, 0.0))
            states[form], singles[form] = seen.state, (of_one * seen.most, left * seen.most)
            moved += count * seen.traffic
            together += count * of_all * seen.most
            gradients += count * form[0].numel() * form[1].itemsize
        passes, values = (round(one / gradients, 2) if gradients else 0.0 for one in (moved, together))
        return cls(passes, states, make, values, singles)

    def state_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's state."""
        return self.states[parameter.shape, parameter.dtype] if parameter.requires_grad else 0

    def single_bytes(self, parameters: Iterable[Tensor], before: Tensor | None = None) -> float:
        """Return the most bytes that it makes for a moment of one of some parameters, where it has one at a time.

        They come one after the other, behind `before`.
        """
        most = left = 0.0
        for one in (before, *parameters):
            if one is not None and one.requires_grad:
                own, next_left = self.singles[one.shape, one.dtype]
                most, left = max(most, own + left if one is not before else 0.0), next_left
        return most


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


class _Seen(NamedTuple):
    """Of a step, in bytes."""

    state: int
    traffic: float  # read and written
    most: int  # of what it makes, when most of that is there


def _step(make: OptimizerMaker, form: _Form, count: int = 1) -> _Seen:
    """Return what is seen in a step of some parameters of one form."""
    said = ""
    for device in ("meta", "cpu"):
        parameters = [nn.Parameter(torch.empty(form[0], dtype=form[1], device=device)) for _ in range(count)]
        for one in parameters:
            if device == "cpu":
                one.data.zero_()
            one.grad = torch.zeros_like(one)
        try:
            made = make(parameters)
            if _by_device(made):
                for group in made.param_groups:
                    if "foreach" in group and group["foreach"] is None:
                        group["foreach"] = True
            made.step()  # the first one makes the state
            kept = [one for state in made.state.values() for name, one in state.items() if name != "step"]
            tensors = [one for one in leaves(kept) if isinstance(one, Tensor)]
            mode = _StepMode([*parameters, *(one.grad for one in parameters), *tensors])
            del kept, tensors  # a step may replace them
            with mode:
                made.step()
        except Exception as error:  # as many ways as there are optimizers
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        kept = [one for state in made.state.values() for name, one in state.items() if name != "step"]
        tensors = [one for one in leaves(kept) if isinstance(one, Tensor) and one.dim() >= min(1, len(form[0]))]
        return _Seen(sum(map(_nbytes, tensors)), mode.traffic, mode.most)
    raise WorkloadError(f"the optimizer takes no step on a parameter of shape {tuple(form[0])}: {said}")


def _by_device(made: torch.optim.Optimizer) -> bool:
    """Return whether torch chooses by the device how the optimizer goes: on a GPU then, all parameters at a time.

    Others that have the choice, as Adafactor, go as they do anywhere.
    """
    homes = (sys.modules.get(one.__module__) for one in type(made).__mro__ if one is not torch.optim.Optimizer)
    return any(hasattr(one, "_default_to_fused_or_foreach") for one in homes)


_SMALL = 2**14  # numbers of a parameter that is small, at the most


def _parts_at_a_time(make: OptimizerMaker, form: _Form) -> tuple[float, float, float]:
    """Return what a step makes for a moment, as parts of what it makes of one parameter alone.

    That is what it makes of every parameter, if of all at a time; what it makes of one, if of one after the other; and
    what it may have then of the one before.
    """
    shape = list(form[0])
    while (largest := max(shape, default=0)) > 1 and torch.Size(shape).numel() > _SMALL:
        shape[shape.index(largest)] = largest // 2
    small = torch.Size(shape), form[1]
    try:
        alone, three, four = (_step(make, small, count).most for count in (1, 3, 4))
    except WorkloadError:  # it is made for one of them
        return 1.0, 0.0, 0.0
    if not alone:
        return 1.0, 0.0, 0.0
    each = min(alone, max(0, four - three))
    return each / alone, (alone - each) / alone, max(0, three - 2 * each - alone) / alone


def _nbytes(one: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in strided_parts(one))


class _StepMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes that operators read and write, and those of the storages that are there."""

    def __init__(self, there: Iterable[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = 0
        self.most = self._now = 0  # besides those that were there
        self._alive: dict[int, Any] = {}
        for one in there:
            self._note(one)
        self.most = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in leaves(out):
            if isinstance(one, Tensor):
                self._note(one)
        if not func.is_view:
            written: Any = out
            if func.overloadpacket.__name__.startswith("_foreach") and out is None:
                written = args[0]  # in place
            both = leaves((args, kwargs or {})), leaves(written)
            self.traffic += sum(_nbytes(one) for part in both for one in part if isinstance(one, Tensor))
        return out

    def _note(self, tensor: Tensor | None) -> None:
        for part in strided_parts(tensor) if tensor is not None else ():
            storage = part.untyped_storage()
            key, nbytes = id(storage), storage.nbytes()
            if key in self._alive:
                continue

            def freed(_: Any, key: int = key, nbytes: int = nbytes) -> None:
                del self._alive[key]
                self._now -= nbytes

            self._alive[key] = weakref.ref(storage, freed)  # a storage's object is the same while it lives
            self._now += nbytes
            self.most = max(self.most, self._now)
