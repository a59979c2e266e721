"""Local SGD: workers train by themselves for some steps, then average their parameters."""

import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...mesh import world as _world
from ...state import parameters_of
from . import register as _register
from ._flat import FlatParameters
from ._session import RelaxedTraining


class LocalSGD(RelaxedTraining):
    """Averages the parameters of all workers every H steps (Stich 2019); not serially equivalent, but for H = 1.

    Call `step` after the optimizer's. Averages are weighted by the samples of each worker since the last one. With
    H = 1, SGD, and gradients that are means over each worker's samples, parameters are those of synchronous training up
    to rounding; with momentum, too, if `state` names "momentum_buffer".

    Args:
        model: The same model on every worker; rank 0's weights count.
        optimizer: Optimizer of its parameters, one on each worker.
        every: H.
        after: Steps during which parameters are averaged at every step before that (post-local SGD, Lin et al. 2020):
            much is won, because the first steps are those at which workers come apart most.
        state: Names of the optimizer's state that is averaged too, as ("momentum_buffer",), or "all" for whatever has
            the shape of its parameter. Others stay with each worker.
        outer_momentum: Momentum of a step on the averages (SlowMo, Wang et al. 2020): the change since the last average
            is taken for a gradient. 0 for the plain average.
        outer_rate: By what the outer step is multiplied.
        group: The workers; None for torch's default group.

    Raises:
        ValueError: workers have different models, or a number makes no sense.

    Example::

        averaging = LocalSGD(model, optimizer, every=8)
        for inputs, target in my_batches:           # as many on each worker
            optimizer.zero_grad()
            loss_fn(model(inputs), target).backward()
            optimizer.step()
            averaging.step(samples=len(target))
        averaging.settle()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        every: int,
        *,
        after: int = 0,
        state: tuple[str, ...] | Literal["all"] = (),
        outer_momentum: float = 0.0,
        outer_rate: float = 1.0,
        group: Any = None,
    ) -> None:
        if every < 1 or after < 0:
            raise ValueError(f"every must be 1 or more and after 0 or more, not {every} and {after}")
        if not 0.0 <= outer_momentum < 1.0 or outer_rate <= 0.0:
            raise ValueError(
                f"outer_momentum must be in [0, 1) and outer_rate positive, not {outer_momentum} and {outer_rate}"
            )
        super().__init__(f"local:{every}", model, optimizer, _world.join(group))
        self._every, self._after = every, after
        self._state = state
        self._outer_momentum, self._outer_rate = outer_momentum, outer_rate
        self._flat = FlatParameters(p for p in parameters_of(model) if p.requires_grad)
        self._last = [flat.clone() for flat in self._flat.flats] if outer_momentum or outer_rate != 1.0 else []
        self._velocity = [torch.zeros_like(flat) for flat in self._last]
        self._since = 0
        self._samples = 0.0
        _register.note(f"local:{every}")

    def step(self, samples: float = 1.0) -> bool:
        """Count a step that has samples; average if it is time, a collective operation, and return whether it was."""
        self._since += 1
        self._samples += samples
        self.progress.updates += 1
        self.progress.samples += samples
        early = self.progress.updates <= self._after
        if not early and self._since < self._every:
            return False
        self.average()
        return True

    @torch.no_grad()
    def average(self) -> None:
        """Average now; a collective operation.

        Raises:
            CommError: a worker has died, or the group's time-out has passed.
        """
        self._flat.check()
        began_s = time.perf_counter()
        share = self._share()
        tensors = list(self._flat.flats)
        spread = []
        for key in self._averaged_state():
            values = [self._optimizer.state.get(p, {}).get(key) for p in self._flat.parameters]
            flats = self._flat.like(values)
            spread.append((flats, values))
            tensors += flats
        buffers = [b for b in self._model.buffers() if b.is_floating_point() and b.numel()]
        for tensor in (*tensors, *buffers):
            tensor.mul_(share)
            if self._world.size > 1:
                dist.all_reduce(tensor, group=self._world.group)
        for flats, values in spread:
            self._flat.spread(flats, values)
        for flat, last, velocity in zip(self._flat.flats, self._last, self._velocity, strict=False):
            velocity.mul_(self._outer_momentum).add_(last - flat)
            flat.copy_(last.sub_(velocity, alpha=self._outer_rate))
        self._since, self._samples = 0, 0.0
        self.progress.averages += 1
        self.progress.waited_s += time.perf_counter() - began_s

    def settle(self) -> None:
        """Average if there were steps since the last time, and learn all workers' counts; a collective operation."""
        if max(self._world.from_all(self._since)):
            self.average()
        self.progress.meet(self._world)

    def close(self, *, failed: bool = False) -> None:
        """See RelaxedTraining. Nothing is held."""

    def _share(self) -> float:
        """Return this worker's part of all samples since the last average."""
        if self._world.size == 1:
            return 1.0
        total = torch.tensor(self._samples, dtype=torch.float64, device=self._world.device)
        dist.all_reduce(total, group=self._world.group)
        return self._samples / float(total) if float(total) else 1.0 / self._world.size

    def _averaged_state(self) -> list[str]:
        """Return names of the optimizer's state to average: the same on every worker."""
        found: set[str] = set()
        if self._state:
            for parameter in self._flat.parameters:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        found.add(key)
            found = set().union(*self._world.from_all(found))
        return sorted(found if self._state == "all" else found.intersection(self._state))
