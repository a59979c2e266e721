"""Batch norm whose statistics are those of the samples of several ranks, and buffers kept as rank 0 has them."""

import copy
import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hocket import comm
from hocket.comm import torch_adapter

from ..batches import batch as _batch
from ..mesh import World
from ..state import FlatBundles


class _Normalise(torch.autograd.Function):
    """Normalises each channel by the mean and variance over all ranks' samples (Ioffe and Szegedy 2015, algorithm 1).

    One all_reduce forward, of counts, sums and sums of squares in float64 (so that subtracting the squared mean loses
    nothing), and one backward, of the two sums over the batch that the gradient of the input needs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, world: World, counts: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        count = x.numel() / x.shape[1] if counts else 0.0
        sums = torch.zeros(2 + 2 * x.shape[1], dtype=torch.float64, device=x.device)
        if count:
            variance, mean = torch.var_mean(wide, axes, correction=0)
            mean, variance = mean.double(), variance.double()
            sums[0] = count
            sums[1] = _mark(torch.cat([mean, variance]))
            sums[2:] = count * torch.cat([mean, variance + mean.square()])
        own_mark = sums[1].clone()
        with comm.label("batch norm"):
            world.all_reduce(sums)
        total, marks = sums[:2]
        mean, square = (sums[2:] / total).chunk(2)
        variance = (square - mean.square()).clamp_(min=0.0)
        scale = torch.rsqrt(variance + eps).to(wide.dtype)
        centred = (wide - mean.to(wide.dtype).view(shape)) * scale.view(shape)
        ctx.save_for_backward(centred, weight, bias, scale, total)
        ctx.world, ctx.axes, ctx.shape, ctx.counts, ctx.dtype = world, axes, shape, counts, x.dtype
        out = centred
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        # A batch that all ranks have alone, undivided, is as many samples as one of them has.
        total = torch.where(marks == world.size * own_mark, total / world.size, total)
        mean, variance = mean.clone(), variance.clone()
        ctx.mark_non_differentiable(mean, variance, total)
        return out.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        centred, weight, bias, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(centred.dtype)
        shape, axes = ctx.shape, ctx.axes
        of_bias, of_weight = gradient.sum(axes), (gradient * centred).sum(axes)
        if not ctx.counts:  # a sample that is here to keep step has changed no statistics
            of_bias, of_weight = torch.zeros_like(of_bias), torch.zeros_like(of_weight)
        sums = torch.cat([of_bias, of_weight]).double()
        with comm.label("batch norm"):
            ctx.world.all_reduce(sums)
        mean_gradient, mean_product = (sums / total).to(centred.dtype).chunk(2)
        if ctx.counts:
            gradient = gradient - mean_gradient.view(shape) - centred * mean_product.view(shape)
        factor = scale if weight is None else scale * weight
        inward = (gradient * factor.view(shape)).to(ctx.dtype)
        wanted = [None if p is None else one.to(p.dtype) for one, p in ((of_weight, weight), (of_bias, bias))]
        return inward, *wanted, None, None, None


def _mark(statistics: torch.Tensor) -> torch.Tensor:
    """Return a whole number, of 1 to 2 ** 36, that is the same for the same float64 alone, as good as surely.

    Other samples can have nearly the same statistics (what an instance norm gives has), so all bits count. The sum of
    many such numbers is exact in float64.
    """
    odd = torch.arange(1, 2 * len(statistics), 2, device=statistics.device) * -0x61C8864680B583EB  # 2 ** 64 / golden
    mixed = (statistics.view(torch.int64) * odd).sum()
    return (mixed >> 28 & 0xFFFFFFFFF) + 1


def normalise(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, world: World, counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise over the samples of all ranks of a group; a collective operation.

    Of `x` (samples, channels, ...) any part may be other ranks', or none this rank's; `counts` says whether this rank's
    samples count in the statistics, and `eps` is added to the variance.

    Returns:
        What x becomes, and of each channel mean and (biased) variance, and of how many values they are.
    """
    function: Any = _Normalise
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    made = function.apply(x, weight, bias, eps, world, counts)
    return made


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks of a group; made of the user's module by `synchronise`.

    It holds the same parameters and buffers under the same names. In evaluation it is the plain one. Its running
    statistics are the same on all ranks of the group, so they need not be sent. A copy (for averaged weights, say) is
    one over the same ranks, a pickle one of the user's module.
    """

    world: World
    _own: type[_BatchNorm]  # the class of the user's module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "world": None}, memo), world=self.world)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: one for name, one in self.__dict__.items() if name not in ("world", "_own")}
        return object.__new__, (self._own,), state

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.ndim < 2:
            raise ValueError(f"expected an input of at least 2 axes (samples, channels), not {input.ndim}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalises."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        out, mean, variance, total = normalise(input, self.weight, self.bias, self.eps, self.world, _batch.counts())
        # Activation checkpointing comes here a second time, in back-propagation.
        if self.track_running_stats and not torch_adapter.in_backward():
            self._track(mean, variance, total)
        return torch.as_tensor(out)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        _track(self.running_mean, self.running_var, mean, variance, total, rate)


@torch.no_grad()
def _track(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    total: torch.Tensor,
    rate: float,
) -> None:
    """Move running statistics towards those of a batch of `total` values a channel."""
    running_mean.lerp_(mean.to(running_mean.dtype), rate)
    running_var.lerp_((variance * (total / (total - 1).clamp(min=1))).to(running_var.dtype), rate)


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _SynchronisedSubclass(SynchronisedBatchNorm):
    """What a class that somebody has made from batch norm becomes: its own forward, whose batch norm is over all ranks.

    timm's batch norm with an activation is such a class.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the user's class does."""
        if not self.training:
            return self._own.forward(self, *args, **kwargs)
        with _OverAllRanks(self.world) as over_all_ranks:
            out = self._own.forward(self, *args, **kwargs)
        if not over_all_ranks.calls:
            raise ValueError(
                f"{self._own.__name__} is a batch norm that does not call torch.nn.functional.batch_norm, so its "
                "statistics cannot be those of several ranks; call it there, or set sync_batch_norm=False"
            )
        return out


class _OverAllRanks(TorchFunctionMode):
    """Computes each torch.nn.functional.batch_norm in training over the samples of all ranks."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.calls = 0
        self._world = world

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.batch_norm:
            return function(*args, **kwargs)
        self.calls += 1
        return self._batch_norm(*args, **kwargs)

    def _batch_norm(
        self,
        input: torch.Tensor,  # noqa: A002
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if bias is None and weight is not None:
            bias = torch.zeros_like(weight)
        out, mean, variance, total = normalise(input, weight, bias, eps, self._world, _batch.counts())
        if running_mean is not None and running_var is not None and not torch_adapter.in_backward():
            _track(running_mean, running_var, mean, variance, total, momentum)
        return torch.as_tensor(out)


@functools.cache
def _synchronised(own: type[_BatchNorm]) -> type[SynchronisedBatchNorm]:
    """Return the class of a user's batch norm over all ranks, which is still what the user's class is."""
    form = SynchronisedBatchNorm if own in _PLAIN else _SynchronisedSubclass
    return type(f"Synchronised{own.__name__}", (form, own), {})


def synchronise(model: nn.Module, world: World) -> list[str]:
    """Make every batch norm in `model`, and what is made from one, one over all ranks of `world`, in place.

    Modules, parameters and buffers stay the same objects, so optimizers and hooks go on to work.

    Returns:
        The names of the modules that were changed.
    """
    changed = []
    for name, module in model.named_modules():
        if world.size == 1 or not isinstance(module, _BatchNorm) or isinstance(module, nn.SyncBatchNorm):
            continue
        if not isinstance(module, SynchronisedBatchNorm):
            own: Any = type(module)
            module._own = own
            module.__class__ = _synchronised(own)
        module.world = world  # type: ignore[assignment]
        changed.append(name)
    return changed


def _synchronised_buffers(model: nn.Module, world: World) -> set[int]:
    """Return ids of the buffers that are the same on all ranks of `world` by themselves."""
    return {
        id(buffer)
        for module in model.modules()
        if isinstance(module, SynchronisedBatchNorm) and module.world.size == world.size
        for buffer in module.buffers(recurse=False)
    }


class BroadcastBuffers:
    """The buffers of some modules, but for those that are the same on all ranks by themselves."""

    def __init__(self, modules: Sequence[torch.nn.Module], world: World) -> None:
        self._modules = list(modules)
        self._world = world
        self._bundles = FlatBundles(world)
        self._equal = set().union(*(_synchronised_buffers(m, world) for m in modules)) if modules else set()

    def send(self) -> None:
        """Give all data-parallel ranks rank 0's; a collective operation."""
        if self._world.size == 1:
            return
        # By name: the stages of a pipeline hold them in the order of their use, which may be another in each process.
        named = (one for module in self._modules for one in sorted(module.named_buffers(), key=itemgetter(0)))
        self._bundles.broadcast(buffer for _, buffer in named if id(buffer) not in self._equal)
