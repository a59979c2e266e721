"""Traces a module into the list of its steps, with the value of each on a sample.

Built on torch.fx. The modules of torch.nn, those of this package (tensor-parallel forms) and those whose code cannot be
traced are single steps; all others are looked into.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from ..batches import trees as _trees
from ..partition.tensor import is_leaf
from ._proxy import DataDependentError, TracedValue, same

_FACTORIES: Final = (
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros",
)  # fmt: skip
_REMEDY: Final = (
    "Move that code into a submodule (which then stays whole, in one stage), or write the model's forward as a "
    "sequence of calls of submodules"
)


class SplitError(ValueError):
    """A model cannot be split into stages as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Traced:
    """A model as a list of steps.

    Attributes:
        model: the user's.
        graph: torch.fx's; every node has in `meta` its "value" on the sample and the "path" of the module it is in.
        whole: submodules that could not be looked into, with the reason.
    """

    model: torch.nn.Module
    graph: fx.Graph
    whole: dict[str, str]

    @functools.cached_property
    def steps(self) -> list[fx.Node]:
        """What is computed, in order: neither inputs, nor parameters and buffers, nor the output."""
        return [node for node in self.graph.nodes if node.op.startswith("call_")]

    @functools.cached_property
    def inputs(self) -> list[fx.Node]:
        """The model's inputs, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def trace(model: torch.nn.Module, sample: Sequence[Any]) -> Traced:
    """Runs a model once on a sample and notes what it does.

    Args:
        model: the user's; its buffers and the random numbers are as before afterwards.
        sample: positional inputs.

    Raises:
        SplitError: the model's own forward cannot be traced.
    """
    whole: dict[str, str] = {}
    while True:
        tracer = _Tracer(tuple(sample), whole)
        try:
            with undisturbed(model), torch.no_grad():
                graph = tracer.trace(model)
            return Traced(model, graph, whole)
        except Exception as error:
            path = tracer.failed
            if not path or path in whole:
                raise SplitError(
                    f"cannot split {type(model).__name__} into stages: {type(error).__name__} while following its "
                    f"forward: {str(error).splitlines()[0] if str(error) else 'no message'}. {_REMEDY}"
                ) from error
            whole[path] = f"{type(error).__name__}: {error}"
        finally:
            tracer.forget()


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Puts buffers, gradients and the state of the random numbers back as they were."""
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Tracer(fx.Tracer):
    """Follows a model's forward on values that know what they are on the sample."""

    proxy_buffer_attributes = True

    def __init__(self, sample: tuple[Any, ...], whole: dict[str, str]) -> None:
        super().__init__()
        self.failed = ""
        self._sample = sample
        self._given: Any = None
        self._whole = whole
        self._path: list[str] = []
        self._computing = False
        self._in_memory: dict[int, set[str]] = {}  # names of the steps whose values share memory
        self._before: set[str] = set()
        self._training: Any = None
        self._mode = True
        self._switched: list[tuple[torch.nn.Module, bool]] = []

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """See torch.fx."""
        self._before = set(vars(root))
        self._mode = root.training
        with self._factories_recorded(), self._functions_recorded(), self._len_recorded(root):
            return super().trace(root, concrete_args)

    def forget(self) -> None:
        """Removes what torch.fx has put into the user's modules."""
        for module, training in self._switched:
            module.__dict__["training"] = training
        root = getattr(self, "root", None)
        for name in list(vars(root)) if root is not None else ():
            if name.startswith("_tensor_constant") and name not in self._before:
                delattr(root, name)

    # --- what torch.fx asks -------------------------------------------------------------------------------------------

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """The sample's values, except None: code asks whether an input `is None`; further parameters keep defaults."""
        self._record_training(self.root)
        args: list[Any] = [self.root]
        for index, value in enumerate(self._sample):
            if value is not None:
                self._given = value
                proxy = self.create_proxy("placeholder", f"input_{index}", (), {})
                proxy.node.meta["index"] = index
                value = proxy
            args.append(value)
        return root_fn, args

    def proxy(self, node: fx.Node) -> TracedValue:
        """A value that knows its sample."""
        return TracedValue(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one step."""
        home = type(m).__module__
        ours = home.startswith("hocket.parallel") or (home.startswith("torch.nn") and not _container(m))
        return ours or is_leaf(m) or module_qualified_name in self._whole

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Notes a call of a submodule, or looks into it."""
        if self._computing:
            return forward(*args, **kwargs)
        try:
            path = self.path_of_module(m)
        except NameError:  # made inside a forward: it has no parameters that anyone trains
            return forward(*args, **kwargs)
        self._path.append(path)
        try:
            if self.is_leaf_module(m, path):
                return self.create_proxy("call_module", path, args, kwargs)
            with self._training_recorded(m), self._len_recorded(m):
                return forward(*args, **kwargs)
        except Exception:
            self.failed = self.failed or path
            raise
        finally:
            self._path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers that a forward uses by itself."""
        if self._computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
        """Notes a step, and takes it on the sample."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = proxy.node
        node.meta["path"] = self._path[-1] if self._path else ""
        before = [(t, t._version) for source in node.all_input_nodes for t in _tensors(source)]
        self._computing = True
        try:
            node.meta["value"] = self._computed(node)
        finally:
            self._computing = False
        changed = {_memory(tensor) for tensor, version in before if tensor._version != version}
        node.meta["changes"] = sorted(name for memory in changed for name in self._in_memory[memory])
        for tensor in _tensors(node):
            self._in_memory.setdefault(_memory(tensor), set()).add(node.name)
        return proxy

    def to_bool(self, obj: Any) -> bool:
        """Branches go the sample's way, except those on whether the model trains: both must work."""
        if obj is self._training and self._path:
            raise DataDependentError("its forward branches on self.training")
        settled: bool = obj.settled_bool()
        return settled

    def iter(self, obj: Any) -> Any:
        """Loops are as long as the sample's."""
        return TracedValue.__iter__(obj)

    def keys(self, obj: Any) -> Any:
        """Keys are the sample's."""
        return list(obj.sampled)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._given
        if node.op == "output":
            return None
        if node.op == "get_attr":
            return attribute(self.root, str(node.target))
        return computed(node, self.root, lambda argument: argument.meta["value"])

    @contextlib.contextmanager
    def _training_recorded(self, module: torch.nn.Module) -> Iterator[None]:
        """`self.training` in a forward that is looked into is the stage's at the time, not the tracing's."""
        if module.training is not self._mode:  # frozen, or being looked into already
            yield
            return
        self._record_training(module)
        try:
            yield
        finally:
            module.__dict__["training"] = self._switched.pop()[1]

    def _record_training(self, module: torch.nn.Module) -> None:
        if self._training is None:
            self._training = self.create_proxy("get_attr", "training", (), {})
            self._training.node.meta["value"] = self._mode
        self._switched.append((module, self._mode))
        module.__dict__["training"] = self._training

    @contextlib.contextmanager
    def _len_recorded(self, module: torch.nn.Module) -> Iterator[None]:
        """`len(batch)` in a forward is a step and not the sample's length; Python itself wants a number from it."""
        space = getattr(type(module).forward, "__globals__", {"len": len})
        if "len" in space:  # the user's own, or there already
            yield
            return

        def recorded(value: Any) -> Any:
            if isinstance(value, TracedValue) and isinstance(value.sampled, torch.Tensor) and not self._computing:
                return self.create_proxy("call_function", len, (value,), {})
            return len(value)

        space["len"] = recorded
        try:
            yield
        finally:
            del space["len"]

    @contextlib.contextmanager
    def _factories_recorded(self) -> Iterator[None]:
        """torch.arange and its like are steps too: their arguments may be sizes, and random ones must be drawn anew."""
        originals = {name: getattr(torch, name) for name in _FACTORIES}

        def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def create(*args: Any, **kwargs: Any) -> Any:
                if self._computing:
                    return original(*args, **kwargs)
                return self.create_proxy("call_function", original, args, kwargs)

            return create

        for name, original in originals.items():
            setattr(torch, name, recorded(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)

    @contextlib.contextmanager
    def _functions_recorded(self) -> Iterator[None]:
        """A user's torch.autograd.Function is one step: looked into, it would lose its backward."""
        original = torch.autograd.Function.__dict__["apply"]

        def recorded(function: Any, *args: Any, **kwargs: Any) -> Any:
            apply = original.__get__(None, function)
            if self._computing:
                return apply(*args, **kwargs)

            def applied(*args: Any, **kwargs: Any) -> Any:
                return apply(*args, **kwargs)

            applied.__name__ = applied.__qualname__ = function.__name__
            return self.create_proxy("call_function", applied, args, kwargs)

        torch.autograd.Function.apply = classmethod(recorded)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in _trees.tensors_in(node.meta["value"]) if t.layout is torch.strided]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def computed(node: fx.Node, root: torch.nn.Module, value_of: Callable[[fx.Node], Any]) -> Any:
    """Takes one step with the values of its arguments."""
    args = fx.node.map_arg(node.args, value_of)
    kwargs = fx.node.map_arg(node.kwargs, value_of)
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def attribute(root: torch.nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _container(module: torch.nn.Module) -> bool:
    return isinstance(
        module,
        torch.nn.Sequential
        | torch.nn.ModuleList
        | torch.nn.ModuleDict
        | torch.nn.Transformer
        | torch.nn.TransformerEncoder
        | torch.nn.TransformerDecoder,
    )


__all__ = ["DataDependentError", "SplitError", "Traced", "attribute", "computed", "same", "trace", "undisturbed"]
