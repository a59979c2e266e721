"""The one call that makes a training script for one device one for many."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader

from hocket.comm import torch_adapter
from hocket.planner import Plan, PlanError, PlanFinding, inner, parse_compression
from hocket.profile import note_plan

from ..batches import DistributedLoader, ShardedLoader, SharedLoader, average, total
from ..data import DataParallel, synchronise
from ..mesh import Mesh, World, own_gpu, warn_of_other_programs
from ..mesh import world as _world
from ..state import Deferred, broadcast_optimizer_state, parameters_of
from ._claim import check_undivided
from ._refusals import check_carried_out, check_optimizer, check_plain, use_choices


def distribute(
    model: torch.nn.Module,
    optimizer: Any = None,
    loader: Iterable[Any] | Sequence[DataLoader[Any]] | None = None,
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    group: Any = None,
    broadcast_buffers: bool = True,
    seed_samples: bool = True,
    sync_batch_norm: bool = False,
    compression: str | None = None,
    timeout_s: float | None = None,
) -> tuple[DataParallel, Any, DistributedLoader | Any]:  # Any: None, which programs need not rule out
    """Make a model, its optimizer and its loader train on all ranks as they would on one; the loop stays as it is.

    Batch sizes, and with them learning rates and schedules, are global: with n ranks each computes an n-th of every
    batch, and the losses and parameters of one device come out, up to floating-point rounding, for any n. Batches that
    n does not divide are weighted. What cannot be equal: layers whose result for a sample depends on other samples of
    the batch (batch norm without synchronisation), and random numbers drawn in the model (dropout). A mean over
    something else than samples (tokens, weights of classes) is weighted by what it divides by, which `backward()` finds
    in the loss's graph, wherever the loss was computed; for a loss whose graph does not tell, pass `loss_weight`.

    Under a launcher (`hocket run`, torchrun, or anything that sets RANK and WORLD_SIZE) this joins the world with
    backend "hocket", unless a process group exists, and leaves it at exit. Without one it works as a world of one rank.

    Args:
        model: the model. If it is on a GPU, it goes to this rank's own (LOCAL_RANK), which becomes the current one.
        optimizer: its optimizer, or a list or tuple of several, each with other parameters of the model; ranks whose
            state or settings differ get rank 0's. None if there is none.
        loader: a torch DataLoader, or an iterable of batches that is the same on every rank; or a list or tuple of
            several DataLoaders, from which the loop takes batches by turns or together (`zip`). None if there is none.
        bucket_bytes: most bytes of gradients that are reduced together. None: as many that there are about eight
            buckets, since what the last one holds cannot be hidden behind back-propagation, but 4 MiB at least and
            64 MiB at most.
        first_bucket_bytes: the same for the bucket that is full first; None for no difference.
        loss_reduction: whether the loss is a "mean" over the samples of a batch or a "sum". What is summed must come
            out of the model's `forward`; a mean may also come from its other methods, over the loader's latest batch.
        loss_weight: gives what the mean loss of a part of a batch divides by, as `(batch["labels"] != -100).sum()`; it
            is called with what the loader yields. None if the loss is a mean over samples or its graph tells.
        group: the ranks that train together; None for torch's default group.
        broadcast_buffers: whether the model's buffers are kept as rank 0's.
        seed_samples: whether random augmentation of a sample is seeded by its place in training, so that it depends
            neither on ranks nor on worker processes.
        sync_batch_norm: whether batch norm's statistics are those of all ranks' samples together, as on one device.
            Batches that ranks share unequally are then weighted at the outputs of the model's `forward`.
        compression: how gradients are made smaller on their way between ranks, as "fp16", "int8" or "topk:0.01"; None
            for what the plan says, "none" for not at all. Training is not serially equivalent then; see
            docs/compression.md.
        timeout_s: seconds that ranks wait for one that is stopped or hangs, before all raise an error that names it.
            None: HOCKET_TIMEOUT, else 300 s, or what the process group has that the program made itself.

    A plan that `hocket run --plan` has given decides where the arguments say nothing; only plain data parallelism
    leaves the loop to you, so other plans are refused.

    Returns:
        The model (`DataParallel`), the optimizer (or the list of them), and the loader (`DistributedLoader`, or a list
        of them); None where None was given.

    Raises:
        ValueError: ranks hold different models, another library distributes the model already, the optimizer is of
            other parameters, a sampler divides the data already, or an argument makes no sense.
        PlanError: the launcher's plan is not plain data parallelism.

    Example::

        model, optimizer, loader = hocket.distribute(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    """
    several = _several(loader)
    if isinstance(model, DataParallel) or any(isinstance(one, SharedLoader) for one in several or [loader]):
        raise ValueError("what hocket.distribute has returned must not be distributed again")
    check_undivided(model)
    check_plain(model)
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for one in optimizers:
        check_optimizer(one)
    world = _world.join(group, timeout_s)
    warn_of_other_programs(world)
    plan = _plain_plan()
    bucket_bytes = plan.bucket_bytes if bucket_bytes is None else bucket_bytes
    compression = plan.compression if compression is None else compression
    parse_compression(compression)
    if sync_batch_norm or plan.sync_batch_norm:
        ranks = 0 if sync_batch_norm else plan.batch_norm_group
        synchronise(model, _neighbours(world, ranks or world.size))
    if (meta := Deferred.of(model)) is not None:  # every rank holds all of it in the end
        if not meta.known:
            raise ValueError("the model is on the meta device: build it as always, or with hocket.deferred(build)")
        meta.align(world)
        meta.finish()
    if world.size > 1:
        take_own_gpu(model)
    distributed = DataParallel(
        model,
        world,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        loss_reduction=loss_reduction,
        broadcast_buffers=broadcast_buffers,
        compression=compression,
    )
    note_plan(plan.resolve(world.size))
    _distributed.add(distributed)
    for one in optimizers:
        _check_trains(one, distributed)
        distributed._follow(one)
        _average_closures(one, world, loss_reduction)
        if world.size > 1:
            broadcast_optimizer_state(one, world)
    if loss_weight is not None and (loader is None or several or loss_reduction == "sum"):
        raise ValueError("loss_weight weights the means of the loader's batches: pass one loader, and no sum")
    if several:
        make = partial(DistributedLoader, group=group, seed_samples=seed_samples)
        return distributed, optimizer, [make(one, stream=i) for i, one in enumerate(several)]
    shared = None if loader is None else DistributedLoader(loader, group=group, seed_samples=seed_samples)
    if shared is not None:
        shared.loss_weight = loss_weight
    return distributed, optimizer, shared


def _several(loader: Any) -> list[Any]:
    """Return the loaders of a list or tuple of them; none where it is one loader, which may be a list of batches."""
    loaders = list(loader) if isinstance(loader, list | tuple) else []
    which = [isinstance(one, DataLoader | SharedLoader) for one in loaders]
    if any(which) and not all(which):
        i = which.index(False)
        raise TypeError(
            f"loader: of several loaders, that at {i} is a {type(loaders[i]).__name__} and no torch DataLoader; make "
            "it one (an IterableDataset with batch_size=None for batches that are made already)"
        )
    return loaders if any(which) else []


# The parameters of what is distributed: one optimizer may train several models.
_distributed: weakref.WeakSet[DataParallel] = weakref.WeakSet()


_closures: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers whose closures give the loss of all ranks


def _average_closures(optimizer: Any, world: World, loss_reduction: str) -> None:
    """Have closures give the loss of all ranks' samples: L-BFGS decides by it how far to go, and when to end."""
    if world.size == 1 or optimizer in _closures or (steps := torch_adapter.steps_of(optimizer)) is None:
        return
    _closures.add(optimizer)
    joined = average if loss_reduction == "mean" else total

    @torch_adapter.outside_compiler
    def of_all(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        if closure is None:
            return None

        def loss_of_all() -> Any:
            loss = closure()
            return loss if loss is None else joined(loss, group=world.group)

        return args[:1], {**kwargs, "closure": loss_of_all}

    steps.register_step_pre_hook(of_all)


def _check_trains(optimizer: Any, model: DataParallel) -> None:
    """Refuse an optimizer that trains nothing of the model, or what no `distribute` has made alike on all ranks."""
    known = {id(p) for one in _distributed for p in parameters_of(one)}
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    mine = {id(p) for p in parameters_of(model)}
    if trained and not any(id(p) in mine for p in trained):
        raise ValueError(
            "the optimizer has none of the model's parameters, so the model would never be trained: make it of "
            "model.parameters(), and of those that the model has now (moving or replacing parameters makes new ones)"
        )
    strange = [p for p in trained if p.requires_grad and id(p) not in known]
    if strange:
        shapes = ", ".join(str(tuple(p.shape)) for p in strange[:3])
        raise ValueError(
            f"the optimizer trains parameters that the model has not ({len(strange)}, of shapes {shapes}): their "
            "gradients would differ from rank to rank. Make them parameters of the model, or distribute the module "
            "that has them (a loss with weights, a likelihood, another model) before this one: "
            "`other, _, _ = hocket.distribute(other)`"
        )


def shard(loader: Iterable[Any], *, group: Any = None) -> ShardedLoader:
    """Divide a loader among ranks for evaluation: every sample exactly once, nothing repeated.

    Args:
        loader: a torch DataLoader, or an iterable of batches that is the same on every rank, or what
            `hocket.distribute` made of one.
        group: the ranks; None for torch's default group.

    Returns:
        An iterable of this rank's parts of the batches. Ranks may get different numbers of them; see `hocket.total`.
    """
    inner = loader.loader if isinstance(loader, SharedLoader) else loader
    return ShardedLoader(inner, group=_joined(group))


def _joined(group: Any) -> Any:
    world: World = _world.join(group)
    return world.group


def _plain_plan() -> Plan:
    """Return the launcher's plan, if a loop of the user's own can carry it out."""
    plan = Plan.from_environment() or Plan()
    check_carried_out(plan)
    use_choices(plan)
    for field in (
        "shard",
        *(axis.field for axis in inner()),
        "accumulate",
        "embeddings",
        "priority",
        "synchronisation",
    ):
        if getattr(plan, field) != getattr(Plan(), field):
            rule = f"a loop of the program's own is for plain data parallelism, and this plan is {plan.describe()}"
            raise _not_here(field, rule, "use hocket.Trainer, or run without --plan")
    for field, remedy in _OF_THE_LOOP.items():
        if (value := getattr(plan, field)) != getattr(Plan(), field):
            rule = f"the plan says {value!r}, which is up to a loop of the program's own"
            raise _not_here(field, rule, f"{remedy}, and leave {field} out of the plan; or use hocket.Trainer")
    return plan


def _not_here(field: str, rule: str, remedy: str) -> PlanError:
    finding = PlanFinding(field, rule, remedy)
    return PlanError("the plan cannot be carried out by hocket.distribute:", [finding])


# Fields of a plan that a Trainer carries out, with what a loop of the program's own says instead.
_OF_THE_LOOP: Final = {
    "clip_norm": "call torch.nn.utils.clip_grad_norm_ before optimizer.step()",
    "recompute": "use torch.utils.checkpoint in the model",
    "precision": "compute under torch.autocast",
}


def _neighbours(world: World, ranks: int) -> World:
    """Return the group of this rank and its neighbours, `ranks` of them together."""
    if ranks == world.size or world.size == 1:
        return world
    return Mesh.make(world, batch_norm=ranks).batch_norm


def take_own_gpu(model: torch.nn.Module) -> None:
    """Move a model that is on a GPU to this rank's own."""
    if not torch.cuda.is_available():
        return
    devices = {p.device for p in parameters_of(model)}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        model.to(own_gpu())
