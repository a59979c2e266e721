"""Notes what a model calls while it runs: functions of torch, by a mode of torch's, modules, sizes and buffers."""

from __future__ import annotations

import builtins
import contextlib
import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hocket.comm import torch_adapter

from ..batches import Numbers, TracedNumber, plain, traced
from ..batches import trees as _trees
from ..partition.tensor import is_leaf
from . import _values
from ._asked import indexed_by_settled, number_functions, settled_index
from ._callers import HERE, calling_frame, calling_line, only_raises
from ._functions import ANSWERS, CONTENTS, OPENED, RANDOM, SEVERAL, SHAPED_BY_FIRST, SIZES, is_loose
from ._numbers import SameAnswer

Tensor = torch.Tensor
_AS_IT_IS: Final[Any] = contextlib.nullcontext()
_CONTAINERS: Final = (
    torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Transformer, torch.nn.TransformerEncoder,
    torch.nn.TransformerDecoder,
)  # fmt: skip
_LISTS: Final = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ParameterList
_DICTS: Final = torch.nn.ModuleDict, torch.nn.ParameterDict


class DataDependentError(RuntimeError):
    """The code branches on numbers that a model computes."""


class ForwardRecorder(TorchFunctionMode, Numbers):
    """Notes what a model calls while it runs."""

    def __init__(
        self,
        model: torch.nn.Module,
        whole: dict[str, str],
        compiled: set[str],
        grad: bool,
        earlier: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.failed = ""
        self.recording = False
        self._whole, self._compiled = whole, compiled
        self._grad, self._earlier = grad, earlier
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._state = {id(tensor): name for name, tensor in reversed(named)}
        self._attributes: dict[str, fx.Node] = {}
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}  # of tensors by id, which are kept
        self._outside: dict[int, Tensor] = {}  # that no step gives, by id: attributes that are no buffers
        self._again: dict[int, Tensor] = {}  # what a step gave as it was, by the id of its second name
        self._path: list[str] = []
        self._in_memory: dict[int, set[str]] = {}  # names of the steps whose values share memory
        self._casts: list[tuple[Any, ...]] = []
        self._spelled: dict[str, TracedNumber] = {}  # numbers by their texts
        self._thread = threading.get_ident()

    def tensors(self) -> dict[int, Tensor]:
        """Return the tensors that were met, by id, and let go of them: checks in the graph would keep them here."""
        found = {key: tensor for key, (tensor, _) in self._nodes.items()}
        for kept in (self._nodes, self._outside, self._again):
            kept.clear()
        return found

    def follow(self, sample: Any) -> None:
        """Run the model on a sample."""
        aliased = _trees.mapped(sample, lambda tensor: tensor.view_as(tensor))  # one tensor may be two inputs
        named = isinstance(aliased, Mapping)
        entries = {}
        for index, value in aliased.items() if named else enumerate(aliased):
            if value is not None:  # code asks whether an input `is None`
                node = self._noted(
                    self.graph.create_node("placeholder", f"input_{index}", name=f"input_{index}"), value
                )
                node.meta["index"] = index
                value = self._known(node, value, ())
            entries[index] = value
        with torch_adapter.uncompiled(), indexed_by_settled(self._model), self._watching(), self:
            self.recording = True
            try:
                output = _trees.called(self._model, entries if named else tuple(entries.values()))
            finally:
                self.recording = False
            result = self._argument(output)
        self.graph.output(result)
        for node in reversed(self.graph.nodes):
            if not node.users and (node.meta.get("idle") or node.op == "get_attr"):
                self.graph.erase_node(node)
            elif node.op != "get_attr":
                node.meta["value"] = _values.leaves(node.meta.get("value"))  # lets go of the autograd graph

    # --- steps ------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call of torch, if it makes or changes a tensor, or gives a size."""
        kwargs = kwargs or {}
        if not self._active():
            return func(*args, **kwargs)
        name, how, noted = func.__name__, func, args
        if name == "__get__":
            name = getattr(func.__self__, "__name__", None) or func.__self__.fget.__name__
            how, noted = getattr, (args[0], name)
        operation = "call_function"
        if getattr(Tensor, name, None) is func and not name.startswith("__"):
            operation, how = "call_method", name
        kind = CONTENTS.get(name)
        with self._computing():
            noted = self._argument(tuple(noted)), self._argument(dict(kwargs))
            if kind or name in OPENED:
                self._refuse_contents(kind or name, noted)
            value, changed = _run(func, args, kwargs)
            if not (changed or kind or name in SIZES or _trees.tensors_in(value)):
                return value
            node = self.graph.create_node(operation, how, *noted)
            node.meta["idle"] = name in SIZES
            in_place = name.endswith("_") and not name.endswith("__")
            node.meta["loose"] = is_loose(name, args, kwargs)
            node.meta["shaped_by_first"] = in_place or name in SHAPED_BY_FIRST
            node.meta["constant"] = name in SIZES or self._constant(node, name)
            if name in SEVERAL:  # before steps that take one of them
                self._check(len, (node,), len(value))
            found = self._result(node, value, changed, in_place=in_place)
        return self.settled(type(value), (found,), value) if kind and kind != "item" else found

    def _step(self, operation: str, target: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note a call that is a step whatever it gives."""
        with self._computing():
            noted = self._argument(tuple(args)), self._argument(dict(kwargs))
            value, changed = _run(run, args, kwargs)
            return self._result(self.graph.create_node(operation, target, *noted), value, changed)

    def _module(self, original: Any, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Note a call of a module, or look into it."""
        path = self._paths.get(id(module)) if self._active() else None
        if path is None:  # made inside a forward: it has no parameters that anyone trains
            return original(module, *args, **kwargs)
        home = type(module).__module__
        ours = home.startswith("hocket.parallel") or (
            home.startswith("torch.nn") and not isinstance(module, _CONTAINERS)
        )
        # One that normalises over the batch stays one step, which can be told its mode, and is named in warnings.
        ours = ours or isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        ours = ours or module._compiled_call_impl is not None  # which stays compiled only where it is called as a whole
        self._path.append(path)
        try:
            if ours or is_leaf(module) or path in self._whole:
                found = self._step("call_module", path, functools.partial(original, module), args, kwargs)
                if numbers := plain_numbers(found):  # steps that come use them as they are here
                    node = next(one for one in reversed(self.graph.nodes) if one.op == "call_module")
                    self._check(plain_numbers, (node,), numbers)
                return found
            with patch.object(torch.compiler, "is_compiling", lambda: True) if path in self._compiled else _AS_IT_IS:
                return original(module, *args, **kwargs)
        except Exception:
            self.failed = self.failed or path
            if path in self._compiled:  # then torch does not call the hooks that it promises to call always
                for key in module._forward_hooks_always_called:
                    named = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
                    module._forward_hooks[key](module, args, *named, None)
            raise
        finally:
            self._path.pop()

    def _result(self, node: fx.Node, value: Any, changed: list[Tensor], *, in_place: bool = False) -> Any:
        """Note what a step has given and changed; return it as tensors and numbers that know their steps."""
        self._noted(node, value)
        memory = {_memory(tensor) for tensor in changed if tensor.layout is torch.strided}
        node.meta["changes"] = sorted(name for one in memory for name in self._in_memory.get(one, ()))
        for tensor in _tensors(node):
            self._in_memory.setdefault(_memory(tensor), set()).add(node.name)
        return self._known(node, value, changed, in_place=in_place)

    def _noted(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(value=value, path=self._path[-1] if self._path else "", changes=[])
        node.meta["within"] = (torch.is_grad_enabled() or not self._grad, self._casts[-1] if self._casts else None)
        return node

    def _known(self, node: fx.Node, value: Any, changed: Any, *, in_place: bool = False) -> Any:
        """Remember which step gives a tensor, and the tensors and numbers inside a structure."""
        if isinstance(value, Tensor):
            same = id(value) in self._nodes or id(value) in self._state or id(value) in self._outside
            if same and not in_place and not any(value is one for one in changed):
                given, value = value, value.view_as(value)  # each name has its own step: dropout, say, while evaluating
                self._again[id(value)] = given
            self._nodes[id(value)] = (value, node)
            return value
        if isinstance(value, torch.Size):
            return torch.Size([self._part(node, i, one, changed) for i, one in enumerate(value)])
        if isinstance(value, Mapping):
            parts = {key: self._part(node, key, one, changed) for key, one in value.items()}
            return value if all(parts[key] is value[key] for key in parts) else _trees.like_mapping(value, parts)
        if isinstance(value, tuple | list):
            items = [self._part(node, i, one, changed) for i, one in enumerate(value)]
            return value if all(map(operator.is_, items, value)) else _trees.like_sequence(value, items)
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            for name in value.__dataclass_fields__:
                object.__setattr__(value, name, self._part(node, name, getattr(value, name), changed, getattr))
            return value
        return traced(value, node, self)

    def _part(self, whole: fx.Node, key: Any, value: Any, changed: Any, take: Any = None) -> Any:
        if not isinstance(value, Tensor | int | float) and not _trees.tensors_in(value):
            return value
        node = self.graph.create_node("call_function", take or operator.getitem, (whole, key))
        self._noted(node, value).meta.update(idle=True, constant=whole.meta.get("constant", False))
        for tensor in _tensors(node):
            self._in_memory.setdefault(_memory(tensor), set()).add(node.name)
        return self._known(node, value, changed)

    def _argument(self, value: Any) -> Any:
        """Return what stands for a value in the arguments of a step."""
        if isinstance(value, Tensor):
            if id(value) in self._nodes:
                return self._nodes[id(value)][1]
            if id(value) in self._state:
                return self._attribute(self._state[id(value)], value)
            if value.grad_fn is not None or id(value) in self._earlier:
                raise DataDependentError(
                    "the code uses a tensor that was computed before this forward, or by something that torch does not "
                    "show, as a function of torch.jit"
                )
            self._outside[id(value)] = value
            return value
        if isinstance(value, TracedNumber):
            return value.node if value.recorder is self else value.plain()
        if type(value) in (tuple, torch.Size):
            return tuple(self._argument(item) for item in value)
        if type(value) is list:
            return [self._argument(item) for item in value]
        if type(value) is dict:
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(item) for item in (value.start, value.stop, value.step)))
        tensors = _trees.tensors_in(value)
        if not tensors:
            if hidden := _hidden(value, self._nodes):
                raise DataDependentError(f"{type(value).__name__} with tensors in it ({hidden}) is handed on")
            return value
        node = self.graph.create_node("call_function", Rebuilt(value), tuple(map(self._argument, tensors)))
        self._noted(node, value).meta["idle"] = True
        return node

    def _attribute(self, name: str, value: Any) -> fx.Node:
        if name not in self._attributes:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                node = self._attributes[name] = self.graph.create_node("get_attr", name)
            self._noted(node, value).meta["constant"] = not isinstance(value, torch.nn.Parameter)
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._in_memory.setdefault(_memory(value), set()).add(node.name)
        return self._attributes[name]

    # --- what Python must know --------------------------------------------------------------------------------------

    def computed(self, how: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        value = how(*plain(values))
        if not self._active():
            return value
        with self._computing():
            node = self._noted(self.graph.create_node("call_function", how, self._argument(values)), value)
            node.meta.update(idle=True, constant=True)
            return traced(value, node, self)

    def spelled(self, number: TracedNumber, text: str) -> str:
        if self._active():
            self._spelled[text] = number
        return text

    def settled(self, how: Callable[..., Any], values: tuple[Any, ...], answer: Any) -> Any:
        if self._active():
            with self._computing():
                self._check(how, self._argument(values), answer)
        return answer

    def _check(self, how: Callable[..., Any], noted: tuple[Any, ...], answer: Any) -> None:
        asked = ", ".join(str(one) for one in noted)
        check = SameAnswer(how, answer, f"{calling_line()}{how.__name__}({asked})")
        self._noted(self.graph.create_node("call_function", check, noted), None)

    def _refuse_contents(self, kind: str, noted: Any) -> None:
        """Refuse to say what is in a tensor, unless that follows from sizes, constants and buffers, or decides nothing.

        What an error alone depends on is checked for each batch.
        """
        found: list[fx.Node] = []
        fx.node.map_arg(noted, found.append)
        for node in found:
            if kind in OPENED or not node.meta.get("constant", False):
                if kind in ANSWERS and any(map(only_raises, (calling_frame(HERE[:1]), calling_frame()))):
                    continue
                raise DataDependentError(f"{calling_line()}the code needs {kind}() of a tensor ({node}) to go on")

    def _constant(self, node: fx.Node, name: str) -> bool:
        random = "rand" in name or "dropout" in name or name in RANDOM
        return not random and all(source.meta.get("constant", False) for source in node.all_input_nodes)

    # --- what is watched --------------------------------------------------------------------------------------------

    def _active(self) -> bool:
        return self.recording and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Open a block that notes calls of modules and autograd functions, lengths, ranges, demands, buffers, casts."""
        call, assign = torch.nn.Module.__call__, torch.nn.Module.__setattr__
        apply = torch.autograd.Function.__dict__["apply"]
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        grad = torch.is_grad_enabled
        all_true: Any = torch._check_tensor_all_with

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self._module(call, module, args, kwargs)

        def assigned(module: Any, name: str, value: Any) -> None:
            if isinstance(value, Tensor) and self._active() and id(module) in self._paths:
                with self._computing():
                    self._buffer(module, name, value)
                given = self._again.get(id(value))
                value = given if given is not None and given is vars(module).get(name) else value  # x = x.to(device)
            assign(module, name, value)

        def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
            return self._function(apply.__get__(None, function), function, args, kwargs)

        def entered(cast: Any) -> Any:
            self._casts.append((cast.device, cast.fast_dtype, cast._enabled))
            return enter(cast)  # type: ignore[no-untyped-call]

        def left(cast: Any, *error: Any) -> Any:
            self._casts.pop()
            return leave(cast, *error)

        def asked() -> bool:
            if self._active() and not sys._getframe(1).f_code.co_filename.startswith(HERE):
                with self._computing():
                    self._check(grad, (), grad())
            return grad()

        def demanded(*args: Any) -> Any:  # or an error: no answer that the code would go on by
            return self._step("call_function", all_true, all_true, args, {}) if self._active() else all_true(*args)

        with contextlib.ExitStack() as stack:
            for owner, name, new in (
                (torch.nn.Module, "__call__", called),
                (torch.nn.Module, "__setattr__", assigned),
                (torch.autograd.Function, "apply", classmethod(applied)),
                (torch.autocast, "__enter__", entered),
                (torch.autocast, "__exit__", left),
                (torch, "is_grad_enabled", asked),
                (torch, "_check_tensor_all_with", demanded),
                (builtins, "len", self._length(len)),
                (builtins, "range", self._range(range)),
                *((kind, "__getitem__", self._taking(vars(kind)["__getitem__"])) for kind in (*_LISTS, *_DICTS)),
                *number_functions(self._model),
            ):
                stack.enter_context(_replaced(owner, name, new))
            yield

    def _taking(self, original: Callable[[Any, Any], Any]) -> Any:
        def taken(modules: Any, key: Any) -> Any:
            for text, number in self._spelled.items() if isinstance(key, str) and self._active() else ():
                if text in key:
                    settled_index(number)
            return original(modules, settled_index(key))

        return taken

    def _length(self, original: Any) -> Any:
        def length(value: Any) -> Any:
            if isinstance(value, Tensor) and self._active():
                return value.size(0)
            return original(value)

        return length

    def _range(self, original: Any) -> Any:
        class RangeKind(type):
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, original)

        class Range(metaclass=RangeKind):
            def __new__(cls, *bounds: Any) -> Any:
                return original(*map(operator.index, (int(one) if isinstance(one, int) else one for one in bounds)))

        return Range

    def _function(self, apply: Any, function: Any, args: Any, kwargs: Any) -> Any:
        """Note a user's autograd function as one step: looked into, it would lose its backward."""
        if not self._active():
            return apply(*args, **kwargs)
        if function is torch.utils.checkpoint.CheckpointFunction:
            run, _, *rest = args
            return run(*rest)

        def applied(*args: Any, **kwargs: Any) -> Any:
            return apply(*args, **kwargs)

        applied.__name__ = applied.__qualname__ = function.__name__
        return self._step("call_function", applied, apply, args, kwargs)

    def _buffer(self, module: torch.nn.Module, name: str, value: Tensor) -> None:
        """Note a buffer that is set as one that is changed in place: stages keep the buffer that they have."""
        old = module._buffers.get(name)
        if old is None or old is value:
            return
        if old.shape != value.shape:
            raise DataDependentError(f"it gives the buffer {name} another shape")
        key = self._state.get(id(old))
        if key is None:  # set before in this forward
            key = f"{self._paths[id(module)]}.{name}".lstrip(".")
        buffer = self._attribute(key, old)
        node = self._noted(self.graph.create_node("call_function", _set, (buffer, self._argument(value))), None)
        node.meta["changes"] = sorted(self._in_memory[_memory(buffer.meta["value"])])


class Rebuilt:
    """A step: a structure of some type, with tensors in their places."""

    __name__ = "rebuilt"

    def __init__(self, like: Any) -> None:
        self._like = _trees.mapped(like, lambda tensor: tensor.detach()[:0] if tensor.dim() else tensor.detach())

    def __call__(self, *tensors: Tensor) -> Any:
        """Return the structure."""
        source = iter(tensors)
        return _trees.mapped(self._like, lambda _: next(source))


def followed() -> bool:
    """Return whether what is called now is called by a forward that is followed."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, ForwardRecorder) for mode in modes)


def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Return what a call gives, and which of its arguments it has changed."""
    before = [(tensor, torch_adapter.version_of(tensor)) for tensor in _trees.tensors_in((args, kwargs))]
    value = function(*plain(tuple(args)), **plain(kwargs))
    return value, [tensor for tensor, version in before if torch_adapter.version_of(tensor) != version]


def plain_numbers(value: Any) -> tuple[float, ...]:
    """Return the numbers in a structure that are no tensors: sizes that a module reads from tensors, say."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return tuple(float(one) for one in leaves if type(one) in (int, float))


def _set(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [t for t in _trees.tensors_in(node.meta["value"]) if t.layout is torch.strided]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _hidden(value: Any, known: Mapping[int, Any], depth: int = 3) -> str:
    """Return where in an object there is a tensor of the forward; "" if there is none."""
    if isinstance(value, torch.nn.Module | type) or callable(value):
        return ""
    inside = vars(value).items() if hasattr(value, "__dict__") else ()
    for name, one in (*inside, *(enumerate(value) if isinstance(value, list | tuple) else ())):
        if any(id(tensor) in known for tensor in _trees.tensors_in(one)):
            return str(name)
        if depth and (deeper := _hidden(one, known, depth - 1)):
            return f"{name}.{deeper}"
    return ""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    had, old = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
