"""A functional Keras model as a row of steps: its operations in the order in which Keras runs them."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import torch

from . import _private

Observe = Callable[[int, float, list[Any]], None]


@dataclass(frozen=True)
class LayerCall:
    """One call of an operation."""

    operation: Any  # a layer, or another operation of Keras'
    node: Any  # Keras' record of the call
    takes: dict[int, str]  # names of values, by the identity of the symbolic tensors that stand for them
    makes: tuple[str, ...]  # names of the values that the call makes
    path: str  # the operation's name, behind those of the models that it is in

    def run(self, values: dict[str, Any], training: bool) -> list[Any]:
        """Run the call on `values`, as Keras' Functional does, and return what it makes."""
        tensors = {key: values[name] for key, name in self.takes.items()}
        args, kwargs = self.node.arguments.fill_in(tensors)
        if "training" in getattr(self.operation, "_call_context_args", ()):
            kwargs["training"] = training
        return list(_private.tree.flatten(self.operation(*args, **kwargs)))

    @cached_property
    def layers(self) -> list[Any]:
        """The layer and those inside it; none for an operation without."""
        return list(self.operation._flatten_layers()) if isinstance(self.operation, keras.layers.Layer) else []

    @property
    def variables(self) -> list[Any]:
        """All that the operation keeps: weights, moving averages, states of random generators."""
        return list(self.operation.variables) if isinstance(self.operation, keras.layers.Layer) else []


class Graph:
    """The steps of a model. Models inside it are taken apart where they are called with plain tensors.

    Attributes:
        model: The Keras model.
        inputs: Names of the values of the model's inputs.
        steps: Calls in the order of Keras' own run.
        outputs: Names of the values that the model gives.

    Raises:
        ValueError: the model is not functional, or an output has no axis of samples.
    """

    def __init__(self, model: Any) -> None:
        functional = functional_of(model)
        if functional is None:
            raise ValueError(
                f"pipeline= cannot cut {model.name!r} of type {type(model).__name__} into stages: Keras has noted no "
                "graph of its layers, as for a Sequential model whose input is a structure of tensors. Build it by "
                "keras.Model(inputs, outputs), or leave pipeline= out"
            )
        samples = functional.inputs[0].shape[0]  # None, or a number where Keras has built the model by a batch
        for tensor in functional.outputs:
            if not len(tensor.shape) or tensor.shape[0] != samples:
                raise ValueError(
                    f"an output of {model.name!r} has the shape {tuple(tensor.shape)}, without an axis of samples, and "
                    "pipeline= puts outputs together from micro-batches: give a row for each sample, or leave "
                    "pipeline= out"
                )
        self.model = model  # a built Sequential or functional model
        self.functional = functional
        self.steps: list[LayerCall] = []
        self.inputs = [f"input {i}" for i in range(len(functional.inputs))]
        names = {id(tensor): name for tensor, name in zip(functional.inputs, self.inputs, strict=True)}
        self._walk(functional, names, "")
        self.outputs = [names[id(tensor)] for tensor in functional.outputs]

    def _walk(self, functional: Any, names: dict[int, str], prefix: str) -> None:
        for depth in sorted(functional._nodes_by_depth, reverse=True):
            for node in functional._nodes_by_depth[depth]:
                operation = node.operation
                if not operation or node.is_input or any(id(t) not in names for t in node.input_tensors):
                    continue
                inner = _taken_apart(node)
                path = f"{prefix}{operation.name}"
                if inner is not None:
                    given = _private.tree.flatten(node.arguments.args[0])
                    scope = {id(t): names[id(g)] for t, g in zip(inner.inputs, given, strict=True)}
                    self._walk(inner, scope, f"{path}/")
                    made = tuple(scope[id(t)] for t in inner.outputs)
                else:
                    made = tuple(f"{len(self.steps)}.{k}" for k in range(len(node.outputs)))
                    takes = {id(t): names[id(t)] for t in node.input_tensors}
                    self.steps.append(LayerCall(operation, node, takes, made, path))
                names.update({id(t): name for t, name in zip(node.outputs, made, strict=True)})

    # --- values -----------------------------------------------------------------------------------------------------

    def last_uses(self) -> dict[str, int]:
        """Return the number of the last step that uses each value; of the model's outputs, the number of steps."""
        found = {name: number for number, step in enumerate(self.steps) for name in step.makes}
        for number, step in enumerate(self.steps):
            for name in step.takes.values():
                found[name] = max(number, found.get(name, 0))
        return found | {name: len(self.steps) for name in self.outputs}

    def flat_inputs(self, x: Any) -> list[Any]:
        """Return the tensors of the model's inputs, in order, as a call of the model would make them of `x`."""
        model = self.model
        converted = _private.tree.map_structure(
            lambda v: v if v is None else model.dtype_policy.convert_input(v, model.autocast, model.input_dtype), x
        )
        return list(self.functional._standardize_inputs(converted))

    def packed(self, outputs: Sequence[Any]) -> Any:
        """Return the model's output, of its tensors in order."""
        structure = self.functional._outputs_struct
        return _private.unpack_singleton(_private.tree.pack_sequence_as(structure, list(outputs)))

    # --- runs -------------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self, training: bool) -> Iterator[None]:
        """Open a block that is to Keras a call of the model: layers inside layers learn there whether it trains."""
        context = self.model._get_call_context()
        before = context.get_value("training")
        context.set_value("training", training)
        try:
            yield
        finally:
            context.set_value("training", before)
            self.model._maybe_reset_call_context()

    def try_out(self, inputs: Sequence[Any], training: bool, observe: Observe) -> None:
        """Run all steps and leave the model as it was.

        `observe` is told the number of a step, its seconds, and what it made.
        """
        gpus = sorted({v.value.device for v in self.model.variables if v.value.is_cuda}, key=str)
        values = dict(zip(self.inputs, inputs, strict=True))

        def now_s() -> float:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            return time.perf_counter()

        with put_back(self.model.non_trainable_variables), torch.random.fork_rng(devices=gpus), torch.no_grad():
            try:
                with self.call(training):
                    for number, step in enumerate(self.steps):
                        begin_s = now_s()
                        made = step.run(values, training)
                        observe(number, now_s() - begin_s, made)
                        values.update(zip(step.makes, made, strict=True))
            finally:
                self.model._clear_losses()


@contextmanager
def put_back(variables: Iterable[Any]) -> Iterator[None]:
    """Open a block after which variables of a model have the values of before."""
    before = [(v.value.data, v.value.detach().clone()) for v in variables if v.dtype != "string"]
    try:
        yield
    finally:
        with torch.no_grad():
            for value, copy in before:
                value.copy_(copy)


def functional_of(model: Any) -> Any:
    """Return the model whose graph of calls Keras has noted; None if it has not, or runs by another call()."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    if isinstance(model, _private.Functional):
        return model if type(model).call is _private.Functional.call else None
    return None


def _taken_apart(node: Any) -> Any:
    """Return the model that `node` calls, if its steps can take the place of the call."""
    inner = functional_of(node.operation)
    if inner is None or node.operation.activity_regularizer is not None or len(node.arguments.args) != 1:
        return None
    if any(value is not None for name, value in node.arguments.kwargs.items() if name != "training"):
        return None
    given = _private.tree.flatten(node.arguments.args[0])
    if isinstance(node.arguments.args[0], dict) or len(given) != len(inner.inputs):
        return None
    same_shape = all(
        isinstance(g, keras.KerasTensor) and g.dtype == t.dtype and len(g.shape) == len(t.shape)
        for g, t in zip(given, inner.inputs, strict=True)
    )
    return inner if same_shape else None
