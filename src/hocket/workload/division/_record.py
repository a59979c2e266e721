"""What a model computes, call by call, as seen while it runs on a sample.

Running it resolves what a symbolic trace cannot (checks of sizes, loops, masks made on the way), and shows real
shapes. Calls of the modules that hold weights are recorded as such; everything else as the torch function that was
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from hocket.sharding import leaves, mapped, operator_name

from .._unchanged import unchanged

CELLS: tuple[type[nn.Module], ...] = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
RECURRENT: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN, *CELLS)
WEIGHTED: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.PReLU,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    *RECURRENT,
)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is recorded as a layer, with the weights that are its own; others are looked into.

    What makes a layer's weight of other parameters (weight norm) leaves it none of its own.
    """
    own: dict[type[nn.Module], str] = {nn.MultiheadAttention: "in_proj_bias", **dict.fromkeys(CELLS, "weight_ih")}
    key = own.get(type(module), "weight_ih_l0" if type(module) in RECURRENT else "weight")
    return type(module) in WEIGHTED and key in module._parameters


DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(eq=False, slots=True)
class RecordedValue:
    """A tensor at one moment; what is changed in place becomes another value."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype  # type of the elements
    grad: bool  # whether a gradient flows to it
    producer: Call | None = None  # the call that made it; None for inputs, parameters and buffers
    name: str = ""  # of the parameter or buffer; empty otherwise

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        count: int = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(eq=False, slots=True)
class Call:
    """One call of a torch function, or of a module that holds weights.

    Attributes:
        index: its place in the order of calls.
        name: of the function, as `hocket.sharding.operator_name` gives it; "module" for a module.
        args, kwargs: what it was given, with values in the places of tensors.
        outputs: the tensors that it returned (or changed, for an assignment to an index).
        module: the module that was called, if it was one.
        func: the function that was called.
        path: names of the modules whose forward was running, outermost first; the model itself is "".
        inputs: the values among its arguments.
    """

    index: int
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[RecordedValue]
    module: nn.Module | None
    path: tuple[str, ...]
    func: Any = None
    inputs: list[RecordedValue] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [v for v in leaves((self.args, self.kwargs)) if isinstance(v, RecordedValue)]


@dataclass(slots=True)
class Recording:
    """What happened in one forward pass."""

    calls: list[Call] = field(default_factory=list)  # in order
    outputs: list[RecordedValue] = field(default_factory=list)  # the values that the model returned
    # the values in each storage, see `storage_of`; while the tensors live
    storages: dict[int, list[RecordedValue]] = field(default_factory=dict)
    complete: bool = False  # whether the model has returned
    paused: bool = False  # whether what is called now is no call of the model's


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self._names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
        self._values: dict[int, RecordedValue] = {}
        self._kept: list[tuple[torch.Tensor, RecordedValue]] = []  # so that no id is used twice
        self.path: list[str] = []
        self.inside_module = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside_module or self.recording.complete or self.recording.paused:
            return func(*args, **kwargs)
        before = self.valued((tuple(args), kwargs))
        result = func(*args, **kwargs)
        name = operator_name(func)
        self.add(name, before, args[0] if name == "setitem" else result, None, func)
        return result

    def valued(self, tree: Any) -> Any:
        return mapped(lambda leaf: self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)

    def add(self, name: str, before: Any, result: Any, module: nn.Module | None, func: Any = None) -> None:
        call = Call(len(self.recording.calls), name, before[0], before[1], [], module, tuple(self.path), func)
        for leaf in leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._values.pop(id(leaf), None)
                value = self._value(leaf)
                value.producer, value.name = call, ""
                call.outputs.append(value)
        self.recording.calls.append(call)

    def _value(self, tensor: torch.Tensor) -> RecordedValue:
        before, self.recording.paused = self.recording.paused, True  # what is asked here of the tensor is no call
        try:
            return self._known(tensor)
        finally:
            self.recording.paused = before

    def _known(self, tensor: torch.Tensor) -> RecordedValue:
        value = self._values.get(id(tensor))
        if value is None:
            name = self._names.get(id(tensor), "")
            value = RecordedValue(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, None, name)
            self._values[id(tensor)] = value
            self._kept.append((tensor, value))
        value.grad = value.grad or tensor.requires_grad  # what an autograd function makes gets its gradient at its end
        return value

    def forget(self) -> None:
        """Let go of all tensors."""
        self._values.clear()
        self._kept.clear()

    def complete(self, outputs: list[torch.Tensor]) -> None:
        """Note that the model has returned; what comes after it is not its own."""
        self.recording.complete = True
        self.recording.outputs = [self._value(tensor) for tensor in outputs]
        for tensor, value in self._kept:
            self.recording.storages.setdefault(storage_of(tensor), []).append(value)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that is the storage's own while it lives; the tensor's, where it has none (inside vmap)."""
    try:
        key: int = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return id(tensor)
    return key


Returned = Callable[[Any], list[torch.Tensor]]


def record(
    model: nn.Module,
    run: Callable[[], Any],
    tensors_in: Returned,
    watch: Callable[[Recording], AbstractContextManager[Any]] = lambda _: nullcontext(),
) -> Recording:
    """Have `run` run the model on a sample in training mode, and return what the model did.

    The model is afterwards what it was, see `unchanged`. `tensors_in` finds the tensors in what the model returns;
    `watch` makes a block around the run, of the recording that grows in it.
    """
    with unchanged(model):
        if not model.training:
            model.train()
        with recorded(model, tensors_in) as recording, torch.enable_grad(), watch(recording):
            run()
    return recording


@contextmanager
def recorded(model: nn.Module, tensors_in: Returned) -> Iterator[Recording]:
    """Open a block in which the model's first forward pass is recorded; the recording grows call by call."""
    recorder = _Recorder(model)
    handles = []

    def completed(_: nn.Module, _args: Any, result: Any) -> None:
        if not recorder.recording.complete:
            recorder.inside_module += 1  # what is asked of tensors here is no call of the model's
            recorder.complete(tensors_in(result))
            recorder.inside_module -= 1

    try:
        for name, module in model.named_modules():
            handles += _listen(recorder, name, module)
        handles.append(model.register_forward_hook(completed))
        with recorder, _functions_heard(recorder):
            yield recorder.recording
    finally:
        recorder.forget()
        for handle in handles:
            handle.remove()


@contextmanager
def _functions_heard(recorder: _Recorder) -> Iterator[None]:
    """Open a block in which a user's autograd function is one call, without a rule: its backward may do anything."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any) -> Any:
        called = original.__get__(None, cls)
        if recorder.inside_module or recorder.recording.complete:
            return called(*args)
        before = recorder.valued((tuple(args), {}))
        recorder.inside_module += 1
        try:
            result = called(*args)
        finally:
            recorder.inside_module -= 1
        recorder.add(cls.__name__, before, result, None)
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _listen(recorder: _Recorder, name: str, module: nn.Module) -> list[Any]:
    if not is_layer(module) and type(module) not in DROPOUTS:

        def enter(*_: Any) -> None:
            recorder.path.append(name)

        return [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(lambda *_: _pop(recorder), always_call=True),
        ]
    pending: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        listening = not (recorder.inside_module or recorder.recording.complete)
        pending.append(recorder.valued((tuple(args), dict(kwargs))) if listening else None)
        recorder.inside_module += 1

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        recorder.inside_module -= 1
        given = pending.pop()
        if given is not None:
            recorder.add("module", given, result, module)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _pop(recorder: _Recorder) -> None:
    recorder.path.pop()
