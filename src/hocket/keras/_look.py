"""A look at a model before its first batch: whether parts of a batch give what the batch gives."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import torch

from hocket._program import warn
from hocket.parallel.batches import BatchShard, Cutter, samples_in, tensors_in, undisturbed
from hocket.parallel.data import look_apart
from hocket.parallel.mesh import World

from . import _metrics, _private, _random
from ._graph import put_back
from ._stage import mask_of

FEW = 8
"""How many samples are looked at: a statistic of few differs most."""


class BatchLook:
    """What a model gives for a batch, and for two parts of it.

    Dropout and noise give one number, batch norm normalises by its moving averages, and all that the model keeps is as
    it was afterwards.

    Args:
        model: A built Keras model.
        data: A batch of Keras': x, y and sample_weight.
        training: Whether it is called to train.
        own_loss: Whether to look at the model's own `compute_loss` too.
        known: What is known of the shapes that the model draws; learns what this look finds.
        step: The model's own `predict_step`, to be called with `data` in the model's place; None for the model.

    Attributes:
        meets: How samples meet in an output of the model; "" where they do not.
        added: How the losses that layers add are none that ranks can average; "" where they are.
        whole_loss: Whether the model's own loss has to be computed of the whole batch.
        draws: What draws random numbers that are not those of one process.
        shapes: Shapes that the model drew, by the number of samples.
        shares: Whether the model draws as in training, each part its rows of the batch's numbers.
        state: The path of a variable in which the model keeps what it has seen of a batch; "" for none.
        untold: The name of a metric that the model or a layer updates by what parts do not add up to; "" for none.
        summed: What such metrics' variables have added up in a run, by path, by the samples' places, first and last.
        kept: What the model keeps besides weights and metrics after a run, by path, by the number of samples.
        generators: torch's state after a run, by its seed and the number of samples.
        masked: Whether an output has a mask.
        training: As given.
        counts: How many outputs the model has, and how many losses its layers add.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        *,
        training: bool,
        own_loss: bool,
        known: _random.DrawnShapes,
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self.meets = self.added = self.state = self.untold = self.unknown = ""
        self.summed: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.generators: dict[tuple[int, int], torch.Tensor] = {}
        self.whole_loss = False
        self.draws: set[str] = set()
        self.shapes: dict[int, list[tuple[int, ...]]] = {}
        self.training = training
        self.shares = self.masked = False
        self.known = known
        self.counts = (0, 0)
        self.step = step
        batch = _private.unpack_x_y_sample_weight(data) if step is None else (data, None, None)
        if not own_loss:
            batch = Cutter(None).cut(batch, 0, min(FEW, samples_in(batch)))
        probe = _ModelProbe(model, self, own_loss=own_loss)
        probe.train(training)
        samples = samples_in(batch)
        places = torch.arange(samples)
        generators = set[int]()
        found = look_apart(probe, ((*batch, places), {}), samples, summed=False, drawn=generators)
        wrong = {} if found is None else found.wrong
        outputs, added = self.counts
        self.meets = next((said for place, said in wrong.items() if place < outputs), "")
        self.added = next((said for place, said in wrong.items() if outputs <= place < outputs + added), "")
        self.whole_loss = any(place >= outputs + added for place in wrong)
        self.state = kept_of_data(self.kept.get(samples, {}), self.kept.values())
        self.untold = self._untold(model, samples)
        if known.learn(self.shapes):
            self.draws.add(_random.OTHER_AXIS)
        self.draws |= unlike(model)
        if not (wrong or self.draws):
            if self._draws_by_torch() or (training and _torch_dropout(model)):
                self.draws.add(_random.BY_TORCH)
            elif generators:
                self.draws.add(_random.BY_PYTHON)
        if not (wrong or self.draws) and any(self.shapes.values()):
            self.shares = True
            found = look_apart(probe, ((*batch, places), {}), samples, summed=False)
            if found is not None and found.wrong:
                self.draws.add(_random.MIXED)

    def _draws_by_torch(self) -> bool:
        """Return whether runs of more samples have drawn more; Keras' functions draw as much for any number here."""
        first: dict[int, torch.Tensor] = {}
        runs = ((first.setdefault(seed, state), state) for (seed, _), state in self.generators.items())
        return not all(torch.equal(one, other) for one, other in runs)

    def error(self, name: str) -> str:
        """Return what refuses `name`, the model or a step of its own; "" for nothing."""
        if self.meets:
            return (
                f"{name} computes what it gives for a sample from other samples of its batch (a statistic of the "
                f"batch, a shuffle, in-batch negatives), and a rank has only some of them: {self.meets}. Compute it "
                "within each sample, or in a loss function that is given to compile, which sees the whole batch"
            )
        if self.added:
            return (
                f"a layer adds a loss (add_loss, activity_regularizer) that is no mean over samples: {self.added}. "
                "Ranks' losses are averaged: divide it by the number of samples (but have an activity_regularizer "
                "return a sum, which Keras divides), or compute it in a loss function that is given to compile, which "
                "sees the whole batch"
            )
        if self.untold:
            return (
                f"metric {self.untold!r}, which the model or a layer of it updates by itself, has another value after "
                "a batch than after its parts, and a rank has a part: give keras.metrics.Mean the mean over the batch, "
                "or others a number for each sample"
            )
        return ""

    def _untold(self, model: Any, samples: int) -> str:
        every = self.summed.pop((0, samples), {})
        half = any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
        for metric in _metrics.other_metrics(model) if len(self.summed) > 1 else ():
            for path in {v.path for v in metric.variables} & every.keys():
                parts = torch.stack([one[path] for one in self.summed.values()])
                off = (every[path] - parts.sum(0)).abs()
                if bool((off > (0.05 if half else 1e-3) * parts.abs().sum(0).maximum(every[path].abs()) + 1e-6).any()):
                    return str(metric.name)
        return ""


class _ModelProbe(torch.nn.Module):
    """Gives a model's outputs, the losses that its layers have added, and its own loss, and leaves it as it was."""

    def __init__(self, model: Any, look: BatchLook, *, own_loss: bool) -> None:
        super().__init__()
        self.model = model
        self._look = [look]
        self._own_loss = own_loss

    def forward(self, x: Any, y: Any, sample_weight: Any, places: torch.Tensor) -> list[torch.Tensor]:
        model, training, look = self.model, self.training, self._look[0]
        part = BatchShard(int(places[0]), int(places[-1]) + 1, max([len(places), *look.shapes]), 1)
        if look.shares:
            torch.manual_seed(0)
            numbers = _random.of_whole_batch(lambda: part, look.known)
        else:
            drawn = look.shapes[len(places)] = []
            numbers = _random.calm(drawn.append, look.draws.add)
        kept = [*model.non_trainable_variables, *model.metrics_variables]
        metrics = _metrics.other_metrics(model)
        summed = [v for metric in metrics for v in metric.variables if v.dtype != "string"]
        with ExitStack() as stack:
            stack.enter_context(undisturbed(list(model._flatten_layers())))  # which torch's modules() does not give
            stack.enter_context(numbers)
            stack.enter_context(by_moving_averages(model))
            stack.enter_context(in_single_precision(model))
            for metric in metrics:
                stack.enter_context(_metrics.by_samples(metric, lambda: part))
            stack.enter_context(put_back(kept))
            for variable in summed:
                variable.value.detach().zero_()
            if look.step is not None:
                y_pred = _private.tree.map_structure(as_tensor, look.step(x))
            else:
                y_pred = model(x, training=training) if model._call_has_training_arg else model(x)
            made = tensors_in(y_pred)
            if not look.shares:
                look.generators.setdefault((torch.initial_seed(), len(places)), _torch_state())
                look.kept[len(places)] = kept_by(model)
                look.summed[part.begin, part.end] = {v.path: v.value.detach().double().clone() for v in summed}
            look.masked = any(mask_of(one) is not None for one in made)
            losses = [loss for loss in model.losses if isinstance(loss, torch.Tensor)]
            own = []
            if self._own_loss:
                own = [model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)]
        look.counts = len(made), len(losses)  # here, as what this module keeps is put back
        # Without a graph, by which masked parts would be weighted: ranks' losses count by their samples.
        return [*made, *(one.detach().requires_grad_() for one in (*losses, *own))]


def as_tensor(value: Any) -> Any:
    """Return an array as a tensor, and what is none as it is."""
    return _private.backend.convert_to_tensor(value) if hasattr(value, "shape") else value


def unlike(model: Any) -> set[str]:
    """Return what draws of a model are known to be others on ranks; a look sees one choice of such a layer."""
    found = any(isinstance(layer, keras.layers.RandAugment) for layer in model._flatten_layers())
    return {"RandAugment, whose Equalization goes by the batch"} if found else set()


def _torch_state() -> torch.Tensor:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.cat([torch.get_rng_state(), *on_gpu])


def _torch_dropout(model: Any) -> bool:
    """Return whether layers have dropout of torch, which evaluates in a look."""
    inner = (one for layer in model._flatten_layers() for one in layer.modules())
    return any(isinstance(one, torch.nn.modules.dropout._DropoutNd) and one.p > 0 for one in inner)


def kept_by(model: Any) -> dict[str, torch.Tensor]:
    """Return what a model keeps besides its weights and metrics, by path; also in numbers of its layers."""
    metrics = {id(v) for v in model.metrics_variables}
    kept = [v for v in model.non_trainable_variables if id(v) not in metrics and v.dtype != "string"]
    held = ((f"{one.path}/{name}", value) for one in model._flatten_layers() for name, value in vars(one).items())
    listed = ((path, value if isinstance(value, list) else [value]) for path, value in held)
    numbers = {
        path: torch.tensor(sum(values), dtype=torch.float64)
        for path, values in listed
        if values and all(isinstance(one, float) for one in values)
    }
    return {**numbers, **{v.path: v.value.detach().double().clone() for v in kept}}


def kept_of_data(whole: dict[str, torch.Tensor], parts: Iterable[dict[str, torch.Tensor]]) -> str:
    """Return the path of what is other after a part of a batch than after the batch; "" for none."""
    for path, value in whole.items():
        if any(not torch.allclose(one[path], value, rtol=1e-3, equal_nan=True) for one in parts if path in one):
            return path
    return ""


@contextmanager
def by_moving_averages(model: Any) -> Iterator[None]:
    """Open a block in which batch norm normalises by its moving averages."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    plain = [layer.__dict__.get("_moments") for layer in layers]
    for layer in layers:
        mean, variance = layer.moving_mean.value.detach().clone(), layer.moving_variance.value.detach().clone()
        layer.__dict__["_moments"] = lambda inputs, mask, m=mean, v=variance: (m.to(inputs), v.to(inputs))
    try:
        yield
    finally:
        for layer, function in zip(layers, plain, strict=True):
            layer.__dict__.pop("_moments")
            if function is not None:
                layer.__dict__["_moments"] = function


@contextmanager
def in_single_precision(model: Any) -> Iterator[bool]:
    """Open a block in which layers of mixed precision compute in their variables', whose rounding hides less.

    Yields whether there are such layers.
    """
    mixed = [(vars(one), vars(one)["_dtype_policy"]) for one in model._flatten_layers() if _is_mixed(one)]
    for own, policy in mixed:
        own["_dtype_policy"] = keras.DTypePolicy(policy.variable_dtype)
    try:
        yield bool(mixed)
    finally:
        for own, policy in mixed:
            own["_dtype_policy"] = policy


def _is_mixed(layer: Any) -> bool:
    policy = vars(layer).get("_dtype_policy")
    return type(policy) is keras.DTypePolicy and policy.compute_dtype != policy.variable_dtype


def judge(look: Any, world: World, name: str) -> None:
    """Tell what a model, or a step of its own, of that name does otherwise than on one device; a collective operation.

    Raises:
        ValueError: what `error` of the look says, on any rank.
    """
    everyone = world.from_all((look.error(name), look.unknown, look.state, sorted(look.draws)))
    error, unknown, state = (next((str(one[i]) for one in everyone if one[i]), "") for i in range(3))
    look.whole_loss = any(world.from_all(look.whole_loss))
    if _drawn([draws for *_, draws in everyone], world):
        return
    if error:
        raise ValueError(error)
    if unknown and world.rank == 0:
        warn(
            f"whether {name} is on {world.size} ranks what it is on one could not be found out: {unknown}. Ranks "
            "average its gradients, by samples",
        )
    if state and world.rank == 0:
        warn(
            f"{name} keeps in {state!r} what it sees of the data, and each rank sees its own samples: within an epoch "
            "it is another than that of one process, and at the end rank 0's",
        )


def _drawn(everyone: list[list[str]], world: World) -> bool:
    """Return whether random numbers are drawn that are not those of one process, of which rank 0 warns."""
    draws = sorted({name for names in everyone for name in names})
    if draws and world.rank == 0:
        warn(
            f"the model draws random numbers by {draws[0]}, and each rank draws for its own samples: they are "
            "others than those of one process. Draw by keras.random.uniform or normal, with samples along the "
            "first axis",
        )
    return bool(draws)
