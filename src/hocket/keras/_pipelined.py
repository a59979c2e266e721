"""Keras' steps of training, evaluation and prediction on a pipeline of stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hocket import comm
from hocket.parallel.batches import BatchShard
from hocket.parallel.mesh import Mesh

from . import _arguments, _metrics, _private, _random
from ._cuts import begins
from ._engine import Batch, Engine
from ._graph import Graph, functional_of
from ._look import BatchLook
from ._stage import Rows
from ._staged import StagedStateBroadcast
from ._steps import Steps


class PipelinedSteps(Steps):
    """Steps in which every rank computes its stage, of its pipeline's part of the batch.

    The last stage puts the outputs of the micro-batches together and computes loss and metrics as Keras does; so the
    loss is that of the batch, whatever it is. Then the micro-batches go backward.
    """

    def __init__(
        self,
        model: Any,  # the Keras model
        mesh: Mesh,  # the ranks
        *,
        synchronise_batch_norm: bool,  # whether batch norm's statistics are those of the whole batch
        bucket_bytes: int | None,  # most bytes of gradients reduced together; None to choose
        micro_batches: int,  # into how many a pipeline's part of a batch is cut
        split: Sequence[str],  # names of the layers that begin the second and later stages
        schedule: str,  # "gpipe" or "1f1b"
    ) -> None:
        super().__init__(model, mesh["data"], synchronise_batch_norm=synchronise_batch_norm, bucket_bytes=bucket_bytes)
        self._mesh = mesh
        self._everyone = mesh.whole
        self._micro_batches = micro_batches
        self._split = tuple(split)
        self._schedule = schedule
        self._engine: Engine | None = None
        self.broadcast = StagedStateBroadcast(model, mesh, self.engine)

    def engine(self) -> Engine:
        """Return this rank's stage of the built model; a collective operation."""
        functional = functional_of(self.model)
        if self._engine is None or self._engine.graph.functional is not functional:
            graph = Graph(self.model)
            found = begins(graph, self._mesh, self._split, self._micro_batches)
            self._engine = Engine(graph, found, self._mesh["pipeline"], self._micro_batches, self._schedule)
        return self._engine

    @property
    def _alone(self) -> bool:
        return False

    @property
    def _parts(self) -> int:
        return self.world.size * self._micro_batches

    def _random_numbers(self) -> AbstractContextManager[None]:
        engine = self.engine()
        engine.renew()
        return _random.of_whole_batch(engine.share, self._shapes, engine.masks.dropout)

    def _install_reducer(self) -> None:
        _arguments.check_micro_batches(self.model, self._micro_batches)
        if self._schedule == "1f1b" and self._gather_outputs:
            raise ValueError(
                'schedule="1f1b" computes the loss of each micro-batch by itself, and a loss of this model is not '
                'known to be a mean over samples: say schedule="gpipe", or give a loss class of your own additive = '
                "True"
            )
        if self.world.size > 1:
            super()._install_reducer()

    def _judged(self, look: BatchLook) -> None:
        if look.masked and look.training and self._schedule == "1f1b" and self._micro_batches > 1:
            raise ValueError(
                "an output of the model has a mask, and the mean over what it leaves is that of the whole batch: say "
                'schedule="gpipe"'
            )

    def _own_variables(self) -> list[Any]:
        variables = self.model.trainable_variables
        owners = self.broadcast._owners(self.engine(), variables)
        return [v for v, owner in zip(variables, owners, strict=True) if owner == self._mesh["pipeline"].rank]

    # --- steps ------------------------------------------------------------------------------------------------------

    def _train(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return self._counted(plain, "train")

    def _counted(self, plain: Callable[[Any], Any], phase: str) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._look(data[0], phase)
            with self._taking() as share:
                if share is None:
                    return plain(data)
                model, engine, tally = self.model, self.engine(), self.tally
                assert tally is not None
                of_losses = [model._loss_tracker, *getattr(model._compile_loss, "metrics", ())]  # of each output
                for metric in _metrics.other_metrics(model):
                    if all(metric is not one for one in of_losses):
                        raise ValueError(
                            f"metric {metric.name!r} is updated by a layer, which with pipeline= only the ranks of one "
                            "stage run, a micro-batch at a time: pass it to compile(metrics=...), or leave pipeline= "
                            "out"
                        )
                x, y, sample_weight = _private.unpack_x_y_sample_weight(data[0])
                training = phase == "train"
                scale = 1.0
                if training:
                    model.zero_grad()
                    scale = float(model.optimizer.scale_loss(1.0)) if model.optimizer is not None else 1.0
                batch = engine.begin(x, share, training=training, scale=scale * share.weight)

                def work() -> dict[str, Any]:
                    return self._work(batch, x, y, sample_weight, share, scale)

                results = model.get_metrics_result
                others: dict[str, Any] = {}
                if engine.last:
                    others = tally.step(work, share, results, phase)
                else:
                    work()
                tally.follow(self._mesh["pipeline"].size - 1, self._mesh["pipeline"], self._unsummed)
                return {**results(), **others}

        return step

    def _work(
        self, batch: Batch, x: Any, y: Any, sample_weight: Any, share: BatchShard, scale: float
    ) -> dict[str, Any]:
        model, training = self.model, batch.training
        loss: Any = None
        with torch.set_grad_enabled(training):
            regularisation = self._regularisation()
        if training and self._schedule == "1f1b":
            losses: list[torch.Tensor] = []
            with self._updating(regularisation, scale):
                y_pred = batch.in_turns(self._of_micro_batches(y, sample_weight, share, scale, losses))
            loss = torch.stack(losses).sum() if losses else None
        else:
            y_pred = batch.forward()
            if y_pred is not None and model._compile_loss is not None:
                with torch.set_grad_enabled(training):
                    loss = self._loss(self._compiled)(x, y, y_pred, sample_weight)
            if training:
                if loss is not None and loss.requires_grad:
                    (loss * scale).backward()
                with self._updating(regularisation, scale):
                    batch.backward()
        aside = self._aside(batch, regularisation)
        if y_pred is None:
            return {}
        with torch.no_grad():
            total = aside if loss is None else loss.detach() + aside
            rows = next(t for t in _private.tree.flatten(x) if t is not None).shape[0]
            model._loss_tracker.update_state(total, sample_weight=rows)
            y_pred = _private.tree.map_structure(_detached, y_pred)
            logs: dict[str, Any] = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return logs

    def _compiled(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Keras' loss of outputs; those that layers and weights add are computed where they are."""
        return self.model._compile_loss(y, y_pred, sample_weight)

    def _of_micro_batches(
        self, y: Any, sample_weight: Any, share: BatchShard, scale: float, losses: list[torch.Tensor]
    ) -> Callable[[Any, Rows], Any]:
        """Return what gives the loss of a micro-batch, by its part of the samples; each is also added to `losses`."""
        samples = max(share.samples, 1)

        def loss_of(output: Any, rows: Rows) -> Any:
            if self.model._compile_loss is None:
                return None

            def part(value: Any) -> Any:
                cut = isinstance(value, torch.Tensor) and value.ndim and len(value) == samples
                return value[rows.begin : rows.end] if cut else value

            goal, weight = (_private.tree.map_structure(part, v) for v in (y, sample_weight))
            loss = self._loss(self._compiled)(None, goal, output, weight) * rows.share
            losses.append(loss.detach())
            return loss * scale if loss.requires_grad else None

        return loss_of

    @contextmanager
    def _updating(self, regularisation: Any, scale: float) -> Iterator[None]:
        """Open a block that does the backward of this stage, after which its weights are updated."""
        model, variables, reducer = self.model, self._own_variables(), self._reducer
        if reducer is not None:
            reducer.prepare()
        with reducer.no_sync() if reducer is not None else nullcontext():
            yield
            if regularisation is not None:
                (regularisation * scale).backward()
        if reducer is not None:
            reducer.reduce_all()
        if model.optimizer is not None:
            with torch.no_grad():
                model.optimizer.apply([v.value.grad for v in variables], variables)
        self.broadcast.note_step()

    def _regularisation(self) -> Any:
        """Return what the weights of this stage add to the loss; None for nothing."""
        found = [v.regularizer(v) for v in self._own_variables() if v.regularizer is not None]
        return torch.stack([self.model._aggregate_additional_loss(loss) for loss in found]).sum() if found else None

    def _aside(self, batch: Batch, regularisation: Any) -> torch.Tensor:
        """Return the losses that layers and weights of all stages add; a collective operation.

        Raises:
            ValueError: they add none, and the model is compiled without a loss.
        """
        world = self._mesh["pipeline"]
        value, count = batch.aside
        if regularisation is not None:
            value, count = value + float(regularisation.detach()), count + 1
        total = torch.tensor([value, count], dtype=torch.float64, device=world.device)
        with comm.label("keras losses"):
            dist.all_reduce(total, group=world.group)
        if self.model._compile_loss is None and not total[1]:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")  # as Keras says it
        return total[0].float()

    def _predict(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(data: Any) -> Any:
            self._look(data[0], "predict")
            with self._taking() as share:
                if share is None:
                    return plain(data)
                engine = self.engine()
                x, _, _ = _private.unpack_x_y_sample_weight(data[0])
                batch = engine.begin(x, share, training=False)
                output = batch.forward()
                whole = self._whole(output, share) if engine.last else None
                return batch.everywhere(whole, share)

        return step


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    mask, value = _private.backend.get_keras_mask(value), value.detach()
    if mask is not None:
        _private.backend.set_keras_mask(value, mask)
    return value
