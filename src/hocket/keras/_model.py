"""A Keras model whose fit, evaluate and predict use all ranks."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import keras
import torch

from hocket.parallel.mesh import Mesh, own_gpu, warn_of_other_programs
from hocket.parallel.mesh import world as _world

from . import _arguments, _private
from ._broadcast import StateBroadcast
from ._callbacks import Follow, placed, wrap
from ._data import cut_batch, shared
from ._pipelined import PipelinedSteps
from ._resume import Resume
from ._staged import check_world
from ._steps import Steps

_OWN = frozenset({"model", "world", "_data_world", "_broadcast", "_steps", "_micro_batches", "_resume", "_divided"})


Verb = TypeVar("Verb", bound=Callable[..., Any])


def _by_own_verb(verb: Verb) -> Verb:
    """Have a verb of `Model` do what the model's own of that name, if it has one, asks of Keras' (KerasHub's does)."""
    name, trainer = verb.__name__, _private.TorchTrainer
    plain = _private.VERBS[name]

    @wraps(verb)
    def whole(self: "Model", *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self.model), name) is plain or getattr(trainer, name) is not plain:
            return verb(self, *args, **kwargs)

        def asked(model: Any, *args: Any, **kwargs: Any) -> Any:
            return verb(self, *args, **kwargs) if model is self.model else plain(model, *args, **kwargs)

        setattr(trainer, name, asked)
        try:
            return getattr(self.model, name)(*args, **kwargs)
        finally:
            setattr(trainer, name, plain)

    return cast(Verb, whole)


class Model:
    """A Keras model, trained on all ranks of a group as on one device.

    It has Keras' verbs with Keras' arguments; all other attributes are the model's. Every rank calls the same verbs
    with the same arguments and the same, whole data. Batch sizes are global: each rank takes its part of each batch.
    Losses, metrics, histories and the logs that callbacks see are those of the whole batches, whatever the number of
    ranks, up to rounding in the order of sums; so are the masks of dropout, and the statistics of batch norm.

    Example::

        import hocket

        model = hocket.keras.Model(model)
        model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
        model.fit(x_train, y_train, batch_size=128, epochs=15, validation_split=0.1)

    Args:
        model: A Keras model, built or not, compiled or not.
        group: The ranks; None for torch's default group, which is set up where a launcher has said how.
        synchronise_batch_norm: Whether batch norm's statistics in training are those of the whole batch, as on one
            device, rather than of each rank's part, with rank 0's moving averages at the end of an epoch. It costs two
            small exchanges a layer.
        shard: What is sharded among the ranks besides the batch: "none", or the "optimizer"'s state, of which each rank
            then keeps and updates the part of its variables (stage 1 of ZeRO).
        bucket_bytes: Most bytes of gradients that are reduced together; None to choose by the model.
        pipeline: Into how many stages a functional model is cut, each computed by a rank of its own; the ranks are then
            so many pipelines as fit, which share batches. On one rank there is nothing to cut, and the history is the
            same.
        micro_batches: Into how many a pipeline's part of a batch is cut, so that stages compute at the same time.
        split: Names of the layers that begin the second and later stages; none to choose by the time they take.
        schedule: "gpipe", in which all micro-batches go forward before the first goes backward, so that the loss may
            be any of the whole batch; or "1f1b", in which a stage keeps the activations of no more micro-batches than
            there are stages, for losses that are means over samples.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: keras.distribution is active, or `shard`, `pipeline` or `micro_batches` ask for what cannot be.
    """

    def __init__(
        self,
        model: Any,
        *,
        group: Any = None,
        synchronise_batch_norm: bool = True,
        shard: Literal["none", "optimizer"] = "none",
        bucket_bytes: int | None = None,
        pipeline: int = 1,
        micro_batches: int = 1,
        split: Sequence[str] = (),
        schedule: Literal["gpipe", "1f1b"] = "gpipe",
    ) -> None:
        _arguments.check_model(model)
        _arguments.check_shard(shard)
        _arguments.check_pipeline(model, pipeline, micro_batches, split, shard, schedule)
        self.model = model
        self.world = self._data_world = _world.join(group)
        warn_of_other_programs(self.world)
        _take_own_gpu(model)
        self._micro_batches = micro_batches
        self._resume: Resume | None = None
        divided = f"pipeline={pipeline}" if pipeline > 1 else f'shard="{shard}"' if shard != "none" else ""
        self._divided = divided if self.world.size > 1 else ""
        if pipeline > 1 and self.world.size > 1:
            check_world(self.world, pipeline)
            mesh = Mesh.make(self.world, {"pipeline": pipeline})
            self._data_world = mesh["data"]
            steps = PipelinedSteps(
                model,
                mesh,
                synchronise_batch_norm=synchronise_batch_norm,
                bucket_bytes=bucket_bytes,
                micro_batches=micro_batches,
                split=split,
                schedule=schedule,
            )
            self._steps: Steps = steps
            self._broadcast: StateBroadcast = steps.broadcast
            return
        self._broadcast = StateBroadcast(model, self.world, shard=shard == "optimizer")
        self._steps = Steps(model, self.world, synchronise_batch_norm=synchronise_batch_norm, bucket_bytes=bucket_bytes)

    # --- looks like the model itself --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not there yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.model, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank alone."""
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<hocket.keras.Model of {self.model!r} on {self.world.size} ranks>"

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print the model's summary, on rank 0."""
        if self.world.rank == 0:
            self.model.summary(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As keras.Model.compile.

        Raises:
            ValueError: steps_per_execution or jit_compile ask for what is not possible.
        """
        _arguments.check_compile(kwargs.get("steps_per_execution", 1), kwargs.get("jit_compile", "auto"))
        self.model.compile(*args, **kwargs)
        self._broadcast.aligned = False

    def resume(self, path: str | Path) -> None:
        """Have the next `fit` go on where a run was told to end, if one was, and end as well should this one be told.

        `fit` saves where it begins and where epochs end. SIGTERM and SIGUSR1 (a preemption, Slurm's `--signal=USR1@90`,
        an eviction, `kill`) end the program between two batches: with exit status 75, or, under `hocket run`, so that
        this gives 75. The next run begins with the epoch that was broken off: its history is that of a run that nothing
        has interrupted, if the callbacks remember nothing, or are Keras' own. To be called once, on all ranks.

        Args:
            path: A directory for the checkpoint, which all hosts share.

        Raises:
            ValueError: this is not the main thread, or ranks hold parts of the model or of the optimizer's state.
        """
        if self._divided:
            raise ValueError(
                f"resume: with {self._divided} no rank holds all that is to be saved; leave that out, or give fit the "
                "callback keras.callbacks.BackupAndRestore"
            )
        self._resume = Resume(Path(path), self.world, self._broadcast)

    # --- training and evaluation ------------------------------------------------------------------------------------

    @_by_own_verb
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """As keras.Model.fit; a collective operation.

        Args:
            x: Arrays, a torch DataLoader, a PyDataset or a generator; the same, whole data on every rank.
            y: Targets.
            batch_size: Samples of a batch over all ranks.
            epochs: Number of the last epoch.
            verbose: As Keras; rank 0 alone prints.
            callbacks: Keras callbacks; see `hocket.keras.callbacks.Callback` for where they run.
            validation_split: Part of the arrays' end to validate on.
            validation_data: What to validate on.
            shuffle: As Keras; the order does not depend on the number of ranks.
            class_weight: As Keras.
            sample_weight: As Keras.
            initial_epoch: As Keras.
            steps_per_epoch: As Keras.
            validation_steps: As Keras.
            validation_batch_size: Samples of a batch over all ranks.
            validation_freq: As Keras.

        Returns:
            Keras' History, the same on every rank.

        Raises:
            ValueError: the model is not compiled; a batch size does not reach for all ranks; ranks have different data.
            TypeError: data of a kind that cannot be shared out.
        """
        model, world = self.model, self.world
        model._assert_compile_called("fit")
        _arguments.check_batch_size(batch_size, self._data_world.size, micro_batches=self._micro_batches)
        _arguments.check_batch_size(validation_batch_size, self._data_world.size, "validation_batch_size")
        _arguments.check_data(x, self._data_world.size, micro_batches=self._micro_batches)
        self._broadcast.agree_on_random_numbers()
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = _private.train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        more = {"shuffle": shuffle, "class_weight": class_weight}
        training = self._shared("x", x, y, sample_weight, batch_size, steps_per_epoch, **more)
        if validation_data is not None:
            val_x, val_y, val_weight = _private.unpack_x_y_sample_weight(validation_data)
            _arguments.check_data(val_x, self._data_world.size, "validation_data")
            size = validation_batch_size or batch_size
            validation_data = (self._shared("validation_data", val_x, val_y, val_weight, size, validation_steps),)
        resume = self._resume
        if resume is not None:
            resume.follow(training, [one.callback for one in wrap(callbacks)], steps_per_epoch)
        self._broadcast.build(training, steps_per_epoch)
        self._broadcast.shard_optimizer()
        with self._steps.installed(training=True):
            history = _private.VERBS["fit"](
                model,
                training,
                epochs=epochs,
                verbose=verbose if world.rank == 0 else 0,
                callbacks=self._placed(callbacks, training=True),
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
                shuffle=False,
            )
        return history if resume is None else resume.whole(history)

    @_by_own_verb
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """As keras.Model.evaluate, over all samples once; a collective operation with the same result on every rank.

        Raises:
            ValueError: the batch size does not reach for all ranks, or ranks have different data.
            TypeError: data of a kind that cannot be shared out.
        """
        data = self._to_judge(x, y, sample_weight, batch_size, steps)
        self._broadcast.build(data, steps)
        self._broadcast.align_once()
        with self._steps.installed(training=False):
            return _private.VERBS["evaluate"](
                self.model,
                data,
                verbose=verbose if self.world.rank == 0 else 0,
                steps=steps,
                callbacks=self._placed(callbacks, training=False),
                return_dict=return_dict,
            )

    @_by_own_verb
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """As keras.Model.predict: the outputs for all of `x`, in its order, on every rank; a collective operation.

        Raises:
            ValueError: the batch size does not reach for all ranks, or ranks have different data.
            TypeError: data of a kind that cannot be shared out.
        """
        data = self._to_judge(x, None, None, batch_size, steps)
        if not self.model.built:
            with torch.random.fork_rng(devices=[]):  # Keras' verb takes no batch for this
                self._broadcast.build(data, steps, compiled=False)
            data.on_epoch_end()
        self._broadcast.align_once()
        with self._steps.installed(training=False):
            return _private.VERBS["predict"](
                self.model,
                data,
                verbose=verbose if self.world.rank == 0 else 0,
                steps=steps,
                callbacks=self._placed(callbacks, training=False),
            )

    @_by_own_verb
    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """As keras.Model.train_on_batch with a global batch; a collective operation."""
        return self._on_batch(
            "train_on_batch", (x, y, sample_weight), class_weight=class_weight, return_dict=return_dict
        )

    @_by_own_verb
    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """As keras.Model.test_on_batch with a global batch; a collective operation."""
        return self._on_batch("test_on_batch", (x, y, sample_weight), return_dict=return_dict)

    @_by_own_verb
    def predict_on_batch(self, x: Any) -> Any:
        """As keras.Model.predict_on_batch with a global batch, all of whose outputs every rank gets."""
        return self._on_batch("predict_on_batch", (x,))

    def _on_batch(self, verb: str, batch: tuple[Any, ...], **kwargs: Any) -> Any:
        model = self.model
        if self.world.size == 1:
            return _private.VERBS[verb](model, *batch, **kwargs)
        _arguments.check_stateless(model, self._steps._parts)
        share, part = cut_batch(batch, self._data_world)
        if verb != "predict_on_batch" or not model.built:
            self._broadcast.build_with(data_batch=part, compiled=verb != "predict_on_batch")
        if verb == "train_on_batch":
            self._broadcast.shard_optimizer()
        self._broadcast.align_once()
        with self._steps.installed(training=verb == "train_on_batch"):
            self._steps.note(share)
            logs = _private.VERBS[verb](model, *part, **kwargs)
        self._broadcast.gather()
        return logs

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """As keras.Model.save: rank 0 writes; a collective operation."""
        self._broadcast.collect()
        self._broadcast.on_root(lambda: self.model.save(filepath, overwrite=overwrite, **kwargs))

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """As keras.Model.save_weights: rank 0 writes; a collective operation."""
        self._broadcast.collect()
        self._broadcast.on_root(lambda: self.model.save_weights(filepath, overwrite=overwrite, **kwargs))

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """As keras.Model.export: rank 0 writes; a collective operation."""
        self._broadcast.on_root(lambda: self.model.export(filepath, *args, **kwargs))

    def load_weights(self, filepath: Any, **kwargs: Any) -> None:
        """As keras.Model.load_weights: rank 0 reads and all ranks get what it has; a collective operation."""
        self._broadcast.on_root(lambda: self.model.load_weights(filepath, **kwargs))
        self._broadcast.align()

    # --- what Keras is given ----------------------------------------------------------------------------------------

    def _to_judge(self, x: Any, y: Any, sample_weight: Any, batch_size: Any, steps: Any) -> Any:
        _arguments.check_batch_size(batch_size, self._data_world.size)
        _arguments.check_data(x, self._data_world.size)
        self._broadcast.agree_on_random_numbers()
        return self._shared("x", x, y, sample_weight, batch_size, steps)

    def _shared(
        self, what: str, x: Any, y: Any, sample_weight: Any, batch_size: Any, steps_per_epoch: Any, **more: Any
    ) -> Any:
        _arguments.check_stateless(self.model, self._steps._parts)
        given = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        given |= {"steps_per_epoch": steps_per_epoch, "shuffle": False, "class_weight": None, **more}
        return shared(given, self._data_world, self._steps.note, what=what, everyone=self.world)

    def _placed(self, callbacks: Any, *, training: bool) -> list[Any]:
        broadcast = self._broadcast
        follow = Follow(self.world, broadcast) if training else None
        collect = broadcast.collect if training and broadcast.zero_optimizer is not None else None
        gather = broadcast.gather if training and broadcast.gathers else None
        resume = self._resume if training else None
        return placed(callbacks, self.world, self._steps.own_logs, follow, collect, gather, resume)


def _take_own_gpu(model: Any) -> None:
    """Move a model that is on a GPU to this rank's own, which becomes the one that Keras means by "cuda"."""
    on_gpu = [variable for variable in model.variables if variable.value.is_cuda]
    if on_gpu:
        own = own_gpu()
        for variable in on_gpu:
            variable.value.data = variable.value.data.to(own)


def load_model(filepath: str | Path, **kwargs: Any) -> Model:
    """As keras.models.load_model, ready for all ranks; every rank reads the file.

    Args:
        filepath: Path of a .keras file.
        **kwargs: `custom_objects`, `compile` and `safe_mode` go to Keras, others to `Model`.
    """
    of_keras = {name: kwargs.pop(name) for name in ("custom_objects", "compile", "safe_mode") if name in kwargs}
    return Model(keras.models.load_model(filepath, **of_keras), **kwargs)
