"""The one object behind which every form of parallelism stands."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from hocket.comm import torch_adapter
from hocket.planner import PLAN_VARIABLE, Plan, Synchronisation
from hocket.profile import note_plan, phase
from hocket.timeline import Timeline
from hocket.units import parse_bytes

from ..batches import (
    Alone,
    BatchPart,
    BatchSplitter,
    DistributedLoader,
    Keywords,
    LossForm,
    LossTally,
)
from ..batches.batch import current, put_back
from ..data import Relaxation
from ..mesh import warn_of_other_programs
from ..mesh import world as _world
from ..state import IncompatibleKeys, StateBytes, checkpoint, clip, deferred, parameters_of, process_memory
from ..state.optim import TrustRatios
from . import _in_and_out
from ._bucket_trial import BucketTrial
from ._call_order import called_alike
from ._claim import Claim
from ._compose import compose
from ._composition import Composition
from ._divide import sample_inputs
from ._loss_check import LossCheck
from ._open_loaders import OpenLoaders
from ._passes import loss_of_model
from ._predict import Predictor, is_loader, joined
from ._preemption import Preemption
from ._refusals import check_pair
from ._step_errors import StepErrors
from ._step_log import StepLog
from ._watches import Watches

AUTO_PLANNER = "hocket.calibrate:auto_plan"
"""Who chooses for `plan="auto"`. It trains models by several plans, so it stands above this package: bound by name."""


class Trainer:
    """Trains a model by any plan: the loss curve, and the model in the end, are those of one process.

    The model, the loss, the optimizer and its learning-rate schedule stay as they are for one device; batch sizes are
    global. What the plan cannot combine, or the world cannot hold, is refused before anything is allocated.

    A batch is a tuple or list: the model's positional inputs, and the target last. The loss is
    `loss_fn(model(*inputs), target)`. Or it is a mapping: the model's keywords. The loss is then
    `loss_fn(model(**batch), batch)`; entries that the model's forward does not take are for the loss alone. Where the
    model computes its loss itself (Hugging Face models do, given labels), `loss_fn` is None: a batch holds inputs only,
    and the loss is the model's output, or the `loss` of it.

    Args:
        model: the model, built alike on every rank; rank 0's weights count. Or a function that builds it, or what
            `hocket.deferred` has made of one: then no rank holds more than its part and a block, also while building.
            Or one that was built under `torch.device("meta")`, which must be loaded before it is trained.
        loss_fn: gives a scalar for the model's output and the target, or a pair of a sum and its count. None
            if the model's output is or has the loss.
        optimizer: a torch optimizer of the model's parameters, or a function that makes it of them. It keeps its
            identity, settings and groups; where the plan divides parameters among ranks, the groups hold this rank's
            parts.
        plan: how to train: a `Plan`, or the path of one; None for the one that `hocket run --plan` has given, or plain
            data parallelism over all ranks. "auto" measures the model and the network, and takes the plan that is
            predicted to be the fastest of those that fit (`hocket.planner.search`).
        sample: inputs of the model (a tuple, one tensor, or a mapping of keywords), by which plans with tensor or
            pipeline parallelism trace and check it; for "auto" those of a global batch, which are the best for a
            pipeline, too: a micro-batch of them says where it is cut.
        loss_reduction: whether the loss is a "mean" over samples, or something else (see docs/losses.md), or a "sum".
        loss_weight: gives what the mean loss of a part of a batch divides by; called with the part as a loader yields
            it. None where that is its samples, where the loss's graph or a tensor of the batch tells it, or for pairs.
        timeout_s: seconds that ranks wait for one that is stopped or hangs, before all raise an error that names it.
            None: HOCKET_TIMEOUT, else 300 s, or what the process group has that the program made itself.

    Raises:
        PlanError: a rule of the plan is broken; with the rule and the remedy.
        ValueError: ranks hold different models, or the optimizer cannot work on parts of parameters.

    Example::

        trainer = hocket.Trainer(model, loss_fn, optimizer, plan=Plan(shard="gradients"))
        for epoch in range(epochs):
            for batch in trainer.batches(loader):
                loss = trainer.step(batch)
    """

    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: Any,
        plan: Plan | str | Path | None = None,
        *,
        sample: Any = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._loss_form = LossForm(loss_reduction, loss_weight)
        world = _world.join(timeout_s=timeout_s)
        warn_of_other_programs(world)
        if not isinstance(model, torch.nn.Module) and callable(model):
            model = deferred(model)
        if callable(optimizer) and not hasattr(optimizer, "param_groups"):
            optimizer = optimizer(model.parameters())
        taken = Keywords(getattr(model, "forward", loss_of_model), targeted=loss_fn is not None)
        sample = taken(sample) if isinstance(sample, Mapping) else sample
        targeted, loss_fn = loss_fn is not None, loss_fn or loss_of_model
        automatic = plan == "auto" or (plan is None and os.environ.get(PLAN_VARIABLE) == "auto")
        chosen = _measured_plan(model, optimizer, sample, world, loss_fn) if automatic else read_plan(plan)
        self.plan = chosen.resolve(world.size)
        self.optimizer = optimizer
        self.steps = 0
        self.grad_norm: float | None = None
        self._loss_fn = loss_fn
        claim = Claim(self, model, optimizer)
        self._composition: Composition = compose(
            model, loss_fn, optimizer, self.plan, world, sample=sample, loss_form=self._loss_form
        )
        self._mesh = self._composition.mesh
        self._loss_check = LossCheck(self._composition, self._loss_form)
        settle = self._composition.finish if self.plan.synchronisation == "every_step" else None
        self._splitter = BatchSplitter(self._mesh["data"], taken, targeted=targeted, settle=settle)
        self._errors = StepErrors(self._mesh)
        self._watches = Watches(self._composition, self.plan, claim, self._errors, model, optimizer, loss_fn)
        self._log = StepLog()
        note_plan(self.plan)
        self._trial = BucketTrial.of(self._composition) if automatic else None
        self._relaxation: Relaxation | None = None
        synchronisation = Synchronisation.parse(self.plan.synchronisation)
        if synchronisation.rule != "every_step":
            reasons = {**self.plan.reasons, "synchronisation": synchronisation.reason}
            self.plan = dataclasses.replace(self.plan, reasons=reasons)
            self._relaxation = Relaxation(
                synchronisation, model, optimizer, world, self._composition.passes.train, loss_reduction
            )
        if world.rank == 0:
            self.plan.keep()
        self._predictor = Predictor(self._composition, sample_inputs(sample, self.plan), taken)
        self._preemption: Preemption | None = None
        self._loaders = OpenLoaders(
            self._relaxation.loader
            if self._relaxation is not None
            else partial(DistributedLoader, among=self._mesh["data"])
        )

    # --- training ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The model as this rank holds it."""
        self._composition.finish()
        return self._composition.model

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's part of each batch of the next epoch of `loader`; `hocket.distribute` says what it may be.

        After `load`, the first call for each loader goes on where the saved run had stopped. Where the plan relaxes
        synchronisation, workers may get different numbers of parts, and the models are made alike at the epoch's end.
        """
        shared = self._loaders.open(loader)
        if self._relaxation is not None:
            return self._relaxation.batches(shared)
        batches = iter(shared) if self._preemption is None else self._preemption.batches(shared)
        return self._watches.between.follow(batches)

    @torch_adapter.outside_compiler
    def step(self, batch: Any) -> torch.Tensor:
        """Take one step of training: forward, backward, and the update of the weights.

        Args:
            batch: what `batches` has yielded, or a global batch that is the same on every rank.

        Returns:
            The loss of the global batch, the same on every rank; a scalar without gradient. Where the plan relaxes
            synchronisation, that of this rank's part.

        Raises:
            TypeError: the batch is no tuple or list, or the loss no scalar.
            ValueError: the batch has no samples; or ranks were given other ones, which is looked at in some steps.
            PlanError: the loss of a batch does not follow from that of the parts that it is cut in: before the first
                step is made; or after one in which the loss had a term that those before had not.
            RuntimeError: ranks' optimizers have different settings.
            StageError: a stage of the pipeline has failed, on every rank; without a pipeline ranks get a CommError
                that has the error of the one that has failed.
        """
        if self._preemption is not None:
            if not self._preemption.inside:
                self._preemption.check()
            self._preemption.in_hand = False
        # Where synchronisation is relaxed, not all workers may get a batch.
        with self._errors.told() if self._relaxation is None else nullcontext():
            self._watches.check_step()
            self._composition.form.forget()
            parts = self._splitter.parts(batch, self.plan.accumulate)
            quiet = self._splitter.unsure or not (self.plan.priority and self.steps)  # nothing is under way
            if self._relaxation is None and quiet:
                place = self._mesh["data"].rank if self._splitter.gave_part else None
                self._watches.same["step"].compare(batch, lambda: place, always=self._splitter.unsure)
            self._watches.between.check(batch, part=self._splitter.gave_part)
            if not parts[0].total:
                raise ValueError("the batch has no samples, so that there is nothing to learn from: leave it out")
            known = self._composition.passes.known
            if self._relaxation is None and not self._loss_check.done:
                part = self._splitter.parts(batch, 1)[0]
                self._loss_check.run(part, self._splitter.whole(batch), self._alone(batch))
            elif self._relaxation is None:
                known.pads = self._alone(batch) is not None
            compared = self._relaxation is None and not (self.plan.priority and self.steps)
            with self._watches.readings.reading(parts[0].samples) if compared else nullcontext():
                begun_s = self._log.begin()
                loss = self._relaxation.step(parts, self._clip) if self._relaxation is not None else self._step(parts)
            self.steps += 1
            ended_s = time.perf_counter()
            self._log.add(begun_s, ended_s)
            if known.new:
                self.finish()
                self._loss_check.run_again(self._splitter.parts(batch, 1)[0])
            if known.padded:
                self.finish()
                self._loss_check.compare_padding(self._splitter.parts(batch, 1)[0], self._alone(batch))
                known.padded = False
        if self._trial is not None:
            self._trial.step(ended_s - begun_s)
        return loss

    def _alone(self, batch: Any) -> Alone | None:
        """Return some samples of a rank's part of a batch, if others pad them to another length."""
        cut = self._splitter.gave_part and self._mesh["pipeline"].size == 1
        note = current(batch) if cut else None
        alone = None if note is None else note.alone_like(batch)
        return alone and alone._replace(batch=self._splitter.part_of(alone.batch, alone.end - alone.begin))

    def _step(self, parts: Sequence[BatchPart]) -> torch.Tensor:
        first, sharded = self.steps == 0, self.plan.shard == "parameters"
        alike = called_alike(self._composition.model, self._mesh, sharded=sharded) if first else nullcontext()
        with alike, self._watches.numbers.drawing():
            loss = self._composition.passes.train(parts)
        self._clip()
        self._composition.update()
        self._watches.note_written()
        self._composition.form.publish()
        return loss()

    def _clip(self) -> None:
        composition, norm = self._composition, self.plan.clip_norm
        if norm is not None:
            self.grad_norm = clip(composition.copies(), norm, self._mesh.whole, local=composition.local)

    def finish(self) -> None:
        """Wait for what `step` has left under way, which is nothing unless the plan says `priority` or is relaxed.

        `evaluate`, `save` and `load` do so by themselves, and with `priority` so do `model` and state dicts: this is
        for programs that read parameters that they have kept. With `priority` a rank may call it alone; a relaxed plan
        makes all ranks' models one here, so all call it.
        """
        self._composition.finish()
        if self._relaxation is not None:
            self._relaxation.settle()

    # --- evaluation -------------------------------------------------------------------------------------------------

    @torch_adapter.outside_inference_mode
    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any], metric: Callable[[Any, Any], Any] | None = None) -> float:
        """Return the mean of a metric or the loss over all samples of `loader`, each exactly once, alike on every rank.

        Args:
            loader: batches of inputs and target, as for training.
            metric: gives the mean over samples for an output and a target; None for the loss, as it was reduced.

        Raises:
            StageError: as for `step`, as is CommError.
        """
        self._watches.check_model()
        self.finish()
        composition, training = self._composition, self.model.training
        composition.buffers.send()
        tally = LossTally(self._loss_form if metric is None else LossForm("mean"))
        measure = composition.guarded(metric or self._loss_fn)
        self.model.eval()
        try:
            # Where a rank fails, its error would keep a loader of its own open.
            opened = cast(Generator[Any], iter(DistributedLoader(loader, among=self._mesh["data"])))
            with self._errors.told("evaluation"), phase("evaluation"), put_back(), closing(opened) as batches:
                for batch in batches:
                    (part,) = self._splitter.parts(batch, 1)
                    self._watches.same["evaluate"].compare(batch, lambda: self._mesh["data"].rank)
                    if metric is None:
                        for found in composition.passes.measured(part, measure):
                            if part.samples and composition.passes.answers:
                                tally.add(found)
                        continue
                    value = composition.passes.value(part, measure)
                    if part.samples and value is not None and composition.passes.answers:
                        tally.sums[:2] += torch.tensor([float(value) * part.samples, part.samples], dtype=torch.float64)
                tally.sums = tally.sums.to(self._mesh.whole.device)
                if self._mesh.whole.size > 1:
                    dist.all_reduce(tally.sums, group=self._mesh.whole.group)
        finally:
            self.model.train(training)
            self._watches.mark_parts()
        return float(tally.mean()[0])

    @torch_adapter.outside_inference_mode
    @torch.no_grad()
    def predict(self, given: Any, *, targets: bool = True) -> Any:
        """Return the model's output for a global batch, in evaluation mode, whole and the same on every rank.

        A collective operation; all ranks give the same. The batch is divided among data-parallel ranks and into
        micro-batches where two of its samples, computed together and apart, show that this gives the same output;
        else every rank computes all of it. Batches may have other sizes than the sample's.

        Args:
            given: A batch: one tensor (or another single value) that the model is called with, or a tuple or list of
                its inputs with the target last, as for `step`. Or a loader of such batches, the outputs of which are
                joined along the samples.
            targets: False if tuples and lists hold inputs only.

        Returns:
            What the model returns, with the containers that it makes.

        Raises:
            StageError: a stage of the pipeline cannot compute this batch (it has other shapes than the sample, say), on
                every rank.
            CommError: without a pipeline, another rank has failed; it has that rank's error.
            ValueError: outputs have different shapes, so they cannot be joined; or ranks were given other batches.
        """
        self._watches.check_model()
        self.finish()
        predictor, training = self._predictor, self.model.training
        self._composition.buffers.send()
        self.model.eval()
        try:
            with self._errors.told("prediction"):
                if not is_loader(given):
                    return predictor.output(predictor.inputs(given, targets))
                return joined(predictor.output(inputs) for inputs in predictor.batches(given, targets))
        finally:
            self.model.train(training)
            self._watches.mark_parts()

    def __getstate__(self) -> dict[str, Any]:
        if self._mesh.whole.size > 1:
            raise RuntimeError(
                "a Trainer of several ranks cannot be pickled: call trainer.save(path) on every rank, which "
                "trainer.load(path) reads, or keep trainer.state_dict()"
            )
        return self.__dict__

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, extra: Any = None) -> None:
        """Write a checkpoint that can be loaded under any plan and with any number of ranks; a collective operation.

        It holds weights, buffers, the optimizer's state and settings, random states, the number of steps, and where the
        loaders of `batches` stand: files of torch's DCP, under the model's own names, with their checksums. What
        compression has not sent yet is not in it, since each rank has something else: error feedback begins anew.

        Args:
            path: a directory; an older checkpoint there is replaced in one instant, when the new one is on the disk.
            extra: anything picklable to be kept with it (the state of a learning-rate schedule, say); rank 0's counts.

        Raises:
            CheckpointError: it cannot be written; the older checkpoint is still there.
        """
        with self._watches.checked(), phase("checkpoint"):
            self.finish()
            if self._preemption is not None:
                self._preemption.saved(Path(path), extra)
            about = {"steps": self.steps, "plan": self.plan.to_json(), "loaders": self._loaders.positions()}
            _in_and_out.save(self._composition, Path(path), about, extra)

    def load(self, path: str | Path, *, weights_only: bool = True) -> Any:
        """Go on where `save` was called, whatever the plan and the number of ranks were; a collective operation.

        Args:
            path: what `save` was given.
            weights_only: whether what is more than plain values and tensors is refused (objects in `extra`, or in the
                settings of an optimizer), since unpickling it can run code, as `torch.load` has it. Say False for a
                checkpoint of your own that has such objects.

        Returns:
            The `extra` that was saved.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or of another model or optimizer. Nothing has been
                overwritten.
        """
        self.finish()
        self._watches.check_claim()
        composition = self._composition
        about, extra = _in_and_out.load(composition, Path(path), weights_only=weights_only)
        composition.known = True
        if composition.form.compression is not None:
            composition.form.compression.forget()
        self.steps = about["steps"]
        self._loaders.place(about["loaders"])
        self._watches.note_written()
        return extra

    def resume(self, path: str | Path, extra: Callable[[], Any] | None = None, *, weights_only: bool = True) -> Any:
        """Go on where a run was told to end, if one was, and save there should this one be; a collective operation.

        From here on SIGTERM and SIGUSR1 (a preemption, Slurm's `--signal=USR1@90`, an eviction, `kill`) write a
        checkpoint after the step that all ranks have made, and end the program: with exit status 75, or, under `hocket
        run`, so that this gives 75. What the program does with a batch of `batches` is done before that. In a loop
        without `batches` the next call of `step` saves, before it makes a step: give `extra` the number of that step
        (`trainer.steps`, as many as are made), and go on with it.

        Args:
            path: a directory for the checkpoint.
            extra: gives what is to be kept with it, when that is saved: the number of the epoch, a schedule's state.
            weights_only: as for `load`.

        Returns:
            What `extra` gave in the run before; None where there is no checkpoint yet.

        Raises:
            ValueError: the plan relaxes synchronisation, so that ranks make different steps; or this is no main thread.
            CheckpointError: as `load`; or no checkpoint could be written there, or not all hosts share the folder.
        """
        if self._relaxation is not None:
            raise ValueError(
                f"resume: under synchronisation {self.plan.synchronisation!r} ranks make different steps, and have "
                "none after which all could save; synchronise every step, or call save and load at the end of an epoch"
            )
        there = checkpoint.exists(Path(path), self._mesh.whole)
        found = self.load(path, weights_only=weights_only) if there else None
        checkpoint.check_place(Path(path), self._mesh.whole)
        given, self._preemption = extra or (lambda: None), None
        place = Path(path).absolute()  # the program may change its directory
        self._preemption = Preemption(self._mesh.whole, Path(path), lambda: self.save(place, given()), given)
        self._preemption.look = lambda: _in_and_out.check_extra(self._composition, given)
        return found

    # --- weights ----------------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the whole model's state dict, as the plain model has it, whatever the plan; a collective operation.

        Tensors are copies on the CPU; keys that are tied share one. What is on its way is 32 MiB or one tensor.

        Args:
            rank0_only: whether rank 0 alone gets it, and other ranks an empty one.
        """
        with self._watches.checked():
            self.finish()
            return _in_and_out.state_dict(self._composition, rank0_only=rank0_only)

    def load_state_dict(self, source: Mapping[str, Any] | str | Path, strict: bool = True) -> IncompatibleKeys:
        """Take the weights of a plain model, whatever the plan; a collective operation. Rank 0's source counts.

        The optimizer keeps its state. What is on its way is 32 MiB or one tensor, if `source` is a path.

        Args:
            source: a state dict; or the path of a checkpoint, of a file or a folder of safetensors (as `save_model`
                and Hugging Face write them), or of a file of `torch.save`.
            strict: whether keys must be those of the model.

        Returns:
            The `missing_keys` and `unexpected_keys`, as torch has them.

        Raises:
            CheckpointError: keys, shapes or types are not those of the model. Nothing has been overwritten.
        """
        self.finish()
        self._watches.check_claim()
        found = _in_and_out.load_state_dict(self._composition, source, strict=strict)
        self._composition.known |= not found.missing_keys
        self._watches.note_written()
        return found

    def save_model(self, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors, which plain torch and transformers load; a collective operation.

        One file `model.safetensors`, or several and their index, as Hugging Face has them; tied weights once. The
        `config.json` of a model of transformers stands beside. No rank holds more than one tensor, or 32 MiB.

        Args:
            folder: where; rank 0 writes.
            max_shard_size: bytes that a file may have, or such as "500 MB".

        Raises:
            CheckpointError: it cannot be written.
        """
        with self._watches.checked(), phase("checkpoint"):
            self.finish()
            _in_and_out.save_model(self._composition, Path(folder), parse_bytes(max_shard_size))

    def close(self) -> None:
        """Let go of what relaxed synchronisation holds: shared memory, threads. The model is then this rank's own.

        Not needed at the end of a program, nor for other plans.
        """
        if self._relaxation is not None:
            self._relaxation.close()

    # --- what it says of itself -------------------------------------------------------------------------------------

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """What LARS or LAMB scaled the last step's updates by; None for other optimizers, or before the first step.

        Every rank knows those of the whole model.
        """
        return getattr(self.optimizer, "trust_ratios", None)

    def memory(self) -> StateBytes:
        """Return the bytes of weights, gradients and optimizer state that this rank holds now."""
        return self._composition.memory()

    def report(self) -> dict[str, Any]:
        """Return the plan, this rank's place in it, its memory, and what was decided about the model; JSON values.

        After some steps of a plan that predicts its time (an automatic one, or one of `hocket plan -o`), "prediction"
        has the seconds of a step's parts as predicted and as this rank measured them, and the error of the whole.
        "process" has the resident memory of this process in bytes, now and at its peak, and what such a plan predicts
        for the peak.
        "divided" has how much of parameter bytes, FLOPs and activation bytes tensor parallelism divides (0 to 1).
        With compression also what it has saved and cost so far, and whether it pays: see docs/compression.md.
        """
        mesh, expected = self._mesh, self._composition.predicted_memory()
        grown = "\n".join(map(str, self._composition.growing))
        return {
            "plan": self.plan.describe(),
            "rank": mesh.whole.rank,
            "world": mesh.whole.size,
            "place": {name: ranks.rank for name, ranks in mesh.axes.items()},
            "memory": self.memory().to_json(),
            "memory_predicted": expected.to_json(),
            "process": {**process_memory(), "predicted": self.plan.predicted.get("resident_bytes")},
            "notes": [*self._composition.notes, *grown.splitlines()],
            "divided": None if self._composition.divided is None else dataclasses.asdict(self._composition.divided),
            "compression": self._composition.compression_report(),
            "steps": self.steps,
            **self._log.checked(self.plan, mesh.whole.rank),
            **({} if self._trial is None else {"buckets": self._trial.to_json()}),
            "relaxed": None if self._relaxation is None else self._relaxation.report(),
            "trust_ratios": None if self.trust_ratios is None else self.trust_ratios.to_json(),
        }

    def timeline(self) -> Timeline:
        """Return the last steps (50 at most, not the first two) of all ranks; a collective operation.

        `hocket.timeline.write_perfetto` makes of it what Perfetto and `hocket compare` open. Computation is the time in
        which a rank did not wait for communication.
        """
        return self._log.timeline(self._mesh.whole)


def without_loss_check(trainer: Trainer) -> Trainer:
    """Return a trainer whose steps are only timed: how its loss adds up over parts of a batch is not looked into."""
    trainer._loss_check.done = True
    return trainer


def _measured_plan(model: torch.nn.Module, optimizer: Any, sample: Any, world: _world.World, loss_fn: Any) -> Plan:
    if any(p.is_meta for p in parameters_of(model)):
        raise ValueError(
            'plan="auto" trains the whole model to measure it, and this one has no memory yet; take a plan of '
            "`hocket plan`, which works by FLOPs and bytes"
        )
    check_pair(model, optimizer)  # rather than after a minute
    plan: Plan = pkgutil.resolve_name(AUTO_PLANNER)(model, optimizer, sample, world, loss_fn=loss_fn)
    return plan


def read_plan(plan: Plan | str | Path | None) -> Plan:
    """Return the plan that was meant: as given, of a file, of the launcher, or the default one.

    A plan that cannot be read is a PlanError.
    """
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.from_toml(Path(plan))
    return Plan.from_environment() or Plan()
