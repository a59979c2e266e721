"""Keras' steps of training, evaluation and prediction, done by all ranks together."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from hocket.parallel.batches import BatchShard
from hocket.parallel.data import GradientReducer, scale_gradients
from hocket.parallel.mesh import World

from . import _batch_norm, _data, _metrics, _private, _random
from ._look import BatchLook, judge
from ._metrics import MetricSums
from ._stage import mask_of
from ._step_look import StepLook, backwards

_STEPS = ("train_function", "test_function", "predict_function")


class Steps:
    """Makes the step functions of a Keras model work on shares of batches.

    Keras' own loops run on every rank, and call its own steps with this rank's samples. Around them:

    - the loss is that of the rank's samples, its gradient weighted by how many they are; where a loss is not known to
      be a mean over samples (see `_metrics`), or where a mask hides some of them, every rank computes the loss of the
      whole batch from all ranks' outputs instead;
    - gradients are averaged over ranks while back-propagation goes on, before Keras' optimizer sees them;
    - metrics are added up over ranks (`MetricSums`), or computed from all ranks' outputs if they are not sums;
    - what `predict` returns is gathered.
    """

    def __init__(self, model: Any, world: World, *, synchronise_batch_norm: bool, bucket_bytes: int | None) -> None:
        self.model = model  # the Keras model
        self.world = world  # the ranks
        self.tally: MetricSums | None = None
        # whether batch norm's statistics are those of the whole batch
        self._synchronise_batch_norm = synchronise_batch_norm
        self._bucket_bytes = bucket_bytes  # most bytes of gradients reduced together; None to choose
        self._yielded: BatchShard | None = None  # of the batch that a loader gave out last and no step has taken
        self._working: BatchShard | None = None  # of the batch that a step works on
        self._installed = False  # whether the model's steps are those of all ranks
        self._reducer: GradientReducer | None = None
        self._reduced: list[int] = []
        self._divisor = 1  # of losses, whose gradients are multiplied by it
        self._everyone = world  # the ranks, and those of their pipelines
        self._shapes = _random.DrawnShapes()
        self._looked_at: dict[Any, Any] = {}  # what the model was compiled with when it was looked at, by what runs
        self._whole_loss = False  # whether the model's own loss is computed of the whole batch

    @property
    def _alone(self) -> bool:
        return self.world.size == 1

    @property
    def _parts(self) -> int:
        """Into how many parts a batch is cut."""
        return self.world.size

    def note(self, share: BatchShard) -> None:
        """Take notice of the batch that a loader gives out."""
        self._yielded = share

    def working(self) -> BatchShard | None:
        """Return this rank's part of the batch that a step works on; None outside of steps."""
        return self._working

    @contextmanager
    def installed(self, *, training: bool) -> Iterator[None]:
        """Open a block in which the model's steps are those of all ranks together."""
        if self._alone or self._installed:  # a verb that a callback of all ranks calls finds the steps of `fit`
            yield
            self.model.__dict__.pop("_symbolic_build", None)
            self._yielded = None
            return
        model = self.model
        for make in (model.make_train_function, model.make_test_function, model.make_predict_function):
            make()
        self._yielded = None  # building the model may have taken a batch
        plain = {name: getattr(model, name) for name in _STEPS}
        losses = [name for name in ("compute_loss", "compute_metrics") if callable(getattr(model, name, None))]
        self._choose_exchanges()
        if training:
            self._install_reducer()
        with ExitStack() as stack:
            stack.enter_context(self._random_numbers())
            if self._synchronise_batch_norm and self.world.size > 1:
                stack.enter_context(_batch_norm.synchronised(model, self.world, self.working))
            stack.callback(self._restore, plain, losses)
            for metric in _metrics.other_metrics(model):
                stack.enter_context(_metrics.by_samples(metric, self.working))
            model.__dict__["compute_loss"] = self._loss(model.compute_loss)
            model.__dict__["compute_metrics"] = self._metrics(model.compute_metrics)
            model.train_function = self._train(plain["train_function"])
            model.test_function = self._counted(plain["test_function"], "test")
            model.predict_function = self._predict(plain["predict_function"])
            self._installed = True
            yield

    def _random_numbers(self) -> AbstractContextManager[None]:
        return _random.of_whole_batch(self.working, self._shapes)

    def _restore(self, plain: dict[str, Any], losses: list[str]) -> None:
        for name, function in plain.items():
            setattr(self.model, name, function)
        for name in (*losses, "_symbolic_build"):
            self.model.__dict__.pop(name, None)
        self._yielded = self._working = None
        self._installed = False

    # --- what is exchanged ------------------------------------------------------------------------------------------

    def _choose_exchanges(self) -> None:
        model = self.model
        self._keras_step = not _is_own(model, "train_step")
        compiled = getattr(model, "_compile_loss", None)
        flat = getattr(compiled, "_flat_losses", None) or []
        self._gather_outputs = not all(_metrics.is_mean_over_samples(item.loss) for item in flat)
        mine, others = _metrics.compiled_metrics(model), _metrics.other_metrics(model)
        self._gather_for_metrics = not all(map(_metrics.is_sum_over_samples, mine))
        for metric in others:
            if not _metrics.is_sum_over_samples(metric):
                raise ValueError(
                    f"metric {metric.name!r} of type {type(metric).__name__} is kept by the model itself, and hocket "
                    "does not know how to put together what ranks have found in their samples. If its variables start "
                    "at zero and are sums over samples, give its class the attribute additive = True; else pass it to "
                    "compile(metrics=...)"
                )
        summed = others if self._gather_for_metrics else [*mine, *others]
        variables = {id(v): v for metric in summed for v in metric.variables if v.dtype != "string"}
        self.tally = MetricSums(list(variables.values()), self.world)
        every = {id(v): v for metric in [*mine, *others] for v in metric.variables if v.dtype != "string"}
        self._unsummed = [v for key, v in every.items() if key not in variables]

    def _own_variables(self) -> list[Any]:
        """Return the variables that this rank trains."""
        return list(self.model.trainable_variables)

    def _install_reducer(self) -> None:
        variables = self._own_variables()
        names, parameters = [v.path for v in variables], [v.value for v in variables]
        if [id(p) for p in parameters] != self._reduced or self._reducer is None:
            self._reducer = None  # its hooks go with it
            if parameters:
                self._reducer = GradientReducer(names, parameters, self.world, self._bucket_bytes, None)
            self._reduced = [id(p) for p in parameters]
        if self._reducer is not None:
            # The mean of a rank's fewer samples has larger gradients, which leave the range of float16 sooner.
            scaled = isinstance(self.model.optimizer, _private.LossScaleOptimizer)
            self._divisor = self.world.size if scaled else 1
            self._reducer.set_weight(self._divisor)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _train(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        counted = self._counted(plain, "train")

        def step(data: Any) -> Any:
            self._look(data[0], "train")
            if self._reducer is not None and self._yielded is not None:
                self._reducer.prepare()
            if self._keras_step or self._yielded is None:
                return counted(data)
            # A step of the user's own may compute its losses anywhere: they are weighed where they go backward.
            weight = self._yielded.weight / self._divisor
            with backwards(lambda plain, losses: plain(_weighed(losses, weight))):
                return counted(data)

        return step

    def _counted(self, plain: Callable[[Any], Any], phase: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._look(data[0], phase)
            with self._taking() as share:
                if share is None:
                    return plain(data)
                assert self.tally is not None
                return self.tally.step(lambda: plain(data), share, self.model.get_metrics_result, phase)

        return step

    def _predict(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._look(data[0], "predict")
            with self._taking() as share:
                output = plain(data)
                return output if share is None else self._whole(output, share)

        return step

    def _look(self, data: Any, phase: str) -> None:
        """Look at the model before its first batch; a collective operation. Raises ValueError: it is refused."""
        model, share = self.model, self._yielded
        training, predicts = phase == "train", phase == "predict"
        own_step = _is_own(model, f"{phase}_step")
        own_loss = not predicts and _is_own(model, "compute_loss")
        key, mark = (
            (phase if own_step else training, own_loss),
            (getattr(model, "optimizer", None), getattr(model, "_compile_loss", None)),
        )
        if share is None or self._parts < 2 or self._looked_at.get(key) == mark:
            return
        self._looked_at[key] = mark
        if share.total < 2 * share.world:  # some rank has no two samples
            data = self._whole(data, share)
        name = f"{type(model).__name__}.{phase}_step" if own_step else "the model"
        if own_step and not predicts:
            if training:
                self._reducer = None  # no gradient of the look is to be averaged
            for _ in range(2):  # again where the first run of the step has made variables of metrics
                assert self.tally is not None
                metrics = (self.tally.variables, self._unsummed)
                step = StepLook(model, data, self._shapes, self._gathers, *metrics, f"{phase}_step")
                if not self._take_made_metrics() or step.wrong:
                    break
            judge(step, self.world, name)
            self._whole_loss |= step.whole_loss
            if training:
                self._install_reducer()
            return
        own_loss &= not self._gather_outputs
        look = BatchLook(
            model,
            data,
            training=training,
            own_loss=own_loss,
            known=self._shapes,
            step=model.predict_step if own_step else None,
        )
        self._take_made_metrics()
        judge(look, self._everyone, name)
        self._judged(look)
        self._whole_loss |= look.whole_loss

    def _take_made_metrics(self) -> bool:
        """Add up metrics, too, whose variables a look's run has made; return whether there are some."""
        assert self.tally is not None
        known = {id(v) for v in (*self.tally.variables, *self._unsummed)}
        made = [m for m in self.model.metrics if any(id(v) not in known for v in m.variables if v.dtype != "string")]
        for metric in made:
            metric.reset_state()
        if made:
            self._choose_exchanges()
        return bool(made)

    def _judged(self, look: BatchLook) -> None:
        """See what else a look has found; on all ranks alike."""

    @contextmanager
    def _taking(self) -> Iterator[BatchShard | None]:
        """Take the share of the batch that was yielded; a second step (of a callback's evaluation, say) gets None."""
        self._working, self._yielded = self._yielded, None
        try:
            yield self._working
        finally:
            self._working = None

    def own_logs(self, logs: Any, phase: str) -> Any:
        """Return logs over this rank's own samples for `logs` over all ranks'; of "train" or "test"."""
        tally = self.tally
        if not logs or tally is None:
            return logs
        results = self.model.get_metrics_result
        own = tally.of_this_rank(phase, results)
        if phase == "train":
            own |= {f"val_{name}": value for name, value in tally.of_this_rank("test", results).items()}
        return {name: own.get(name, value) for name, value in logs.items()}

    # --- the loss of the whole batch --------------------------------------------------------------------------------

    def _gathers(self, y_pred: Any) -> bool:
        """Return whether the compiled loss of an output is computed of the whole batch."""
        return self._gather_outputs or any(mask_of(t) is not None for t in _private.tree.flatten(y_pred))

    def _loss(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            share = self._working
            if share is None:
                return plain(x, y, y_pred, sample_weight, *args, **kwargs)
            weight = share.weight / self._divisor if self._keras_step else 1.0
            given = sample_weight
            if self._whole_loss:
                x = self._whole(x, share)
            if self._whole_loss or self._gathers(y_pred):
                factor = self.world.size / share.weight if share.weight else 0.0
                y, sample_weight = self._whole(y, share), self._whole(sample_weight, share)
                y_pred = self._whole(y_pred, share, factor)
            loss = plain(x, y, y_pred, sample_weight, *args, **kwargs)
            self._take_rows(given, sample_weight, share)
            if self._keras_step and isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() > 1:
                raise ValueError(
                    f"the loss has the shape {list(loss.shape)}, of which Keras takes no gradient: "
                    'give its mean, as a loss with reduction="sum_over_batch_size" does'
                )
            if weight != 1.0 and isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss = scale_gradients(loss, weight)
            return loss

        return compute_loss

    def _metrics(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compute_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            share = self._working
            if share is not None and self._gather_for_metrics:
                y, y_pred = self._whole(y, share), self._whole(y_pred, share)
                sample_weight = self._whole(sample_weight, share)
            return plain(x, y, y_pred, sample_weight)

        return compute_metrics

    def _take_rows(self, mine: Any, whole: Any, share: BatchShard) -> None:
        """Take over what Keras has written to the weights of samples: it multiplies them by masks, in place."""
        for rows, all_rows in zip(_private.tree.flatten(mine), _private.tree.flatten(whole), strict=True):
            if rows is not all_rows and isinstance(rows, torch.Tensor) and share.samples and self.world.size > 1:
                rows.copy_(all_rows[share.begin : share.end])

    def _whole(self, rows: Any, share: BatchShard, factor: float | None = None) -> Any:
        """Return the whole batch's rows of every tensor. Raises ValueError: a tensor has not a row for each sample."""
        here = max(share.samples, 1)

        def whole(tensor: Any) -> Any:
            if not hasattr(tensor, "shape"):
                return tensor
            tensor = _private.backend.convert_to_tensor(tensor)  # arrays that were given to train_on_batch
            if not tensor.ndim or tensor.shape[0] != here:
                raise ValueError(
                    f"cannot put together a tensor of shape {list(tensor.shape)} from all ranks: it has not a row for "
                    f"each of this rank's {here} samples along its first axis"
                )
            if factor is None:
                result = _data.gathered(tensor, share, self.world)
            else:
                result = _data.gathered_with_gradient(tensor, share, self.world, factor)
            mask = mask_of(tensor)
            if mask is not None:
                _private.backend.set_keras_mask(result, _data.gathered(mask, share, self.world))
            return result

        return None if rows is None else _private.tree.map_structure(whole, rows)


def _is_own(model: Any, name: str) -> bool:
    return getattr(type(model), name) is not getattr(_private.TorchTrainer, name)


def _weighed(losses: Any, weight: float) -> Any:
    """Return one loss or several, whose gradients count `weight` times."""
    if weight == 1.0:
        return losses
    if isinstance(losses, torch.Tensor):
        return scale_gradients(losses, weight) if losses.requires_grad else losses
    return [_weighed(one, weight) for one in losses]
