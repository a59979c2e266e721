"""What steps, stages, shards and exchanges cost besides computation, measured by small models.

What only rank and interpreter do is measured by models that hardly compute; what makes ranks wait for each other by
models that do, since a rank whose message has come waits for a processor on which another computes. All probes take
turns, so that a slow phase of the machine meets all alike: it is their differences that count.
"""

import dataclasses
import io
import math
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hocket.parallel.compose import Trainer, without_loss_check
from hocket.parallel.data import on_several_hosts
from hocket.parallel.mesh import World
from hocket.planner import Constants, Network, Plan, waiting
from hocket.workload import Workload, capture

_THIN, _WIDE = 8, 256  # 8 x 8 weights a layer hardly compute, 256 x 256 do
_BLOCKS = 6
_ROWS = 16  # of a rank's part of a batch
_MANY_ROWS = 1024  # so that wide layers compute for some ms, of a micro-batch too
_SEVERAL = 4  # layers in a block whose many tensors count; parts of a batch
_FEW, _MANY = 4, 16  # micro-batches
_TURNS = 12
_LONG_S = 10.0


@dataclass(frozen=True, slots=True)
class _Probe:
    """A chain of blocks of linear layers, and how it is trained."""

    plan: Plan = Plan()  # plan by which the chain is trained
    layers: int = 1  # layers of a block
    width: int = _THIN  # width of a layer
    rows: int = _ROWS  # rows of a rank's part of a batch
    blocks: int = _BLOCKS  # blocks of the chain


def with_overheads(
    constants: Constants, network: Network, device: torch.device, world: World, until_s: float = math.inf
) -> Constants:
    """Return the constants, completed by what was measured until an instant; a collective operation.

    Times of stages and blocks, whose ranks shared processors meanwhile, are brought down to those of one alone.
    """
    probes = _probes(world.size)
    steps = [_step(probe, device, world) for probe in probes.values()]
    with torch.random.fork_rng(devices=[]):
        chain = _model(_Probe()).to(device)
    steps.append(partial(_passes, chain, torch.zeros(_ROWS // _SEVERAL, _THIN, device=device)))
    *seconds, bare_s = in_turns(steps, device, world, turns=_TURNS, together=1, long_s=_LONG_S, until_s=until_s)
    prefetch = device.type == "cuda" or on_several_hosts(world)
    found = _Measured(dict(zip(probes, seconds, strict=True)), probes, constants, network, prefetch)
    pass_s = found.pass_s(bare_s)
    step_s = max(0.0, found.took["plain"] - pass_s * network.crowding(world.size))
    changed: dict[str, Any] = {"prefetch": prefetch, "step_s": step_s, "pass_s": pass_s, "stage_s": found.stage_s()}
    changed |= found.of_sharded_states() | found.of_sharded_parameters() | found.of_exchanges()
    return dataclasses.replace(constants, **changed)


@dataclass(frozen=True)
class _Measured:
    """What the probes took, and what that says of the constants."""

    took: dict[str, float]  # seconds of a step of each probe, by its name
    probes: dict[str, _Probe]  # the probes, by name
    constants: Constants  # constants with what collectives reach
    network: Network  # the ranks' network
    prefetch: bool  # whether sharded parameters are gathered while others are computed

    def stage_s(self) -> float:
        """Of a stage that hands on a micro-batch. Large ones compute, but on a slow network more of them hide more."""
        ranks = self.network.world
        if ranks % _stages(ranks):
            return 0.0
        each = (self._besides(f"{_MANY}{size} micro-batches", f"{_FEW}{size} micro-batches") for size in ("", " large"))
        return max(each) / (_MANY - _FEW) / self.network.crowding(ranks)

    def pass_s(self, bare_s: float) -> float:
        """Return what a part of a batch costs besides its passes, of which all parts but the first took `bare_s`."""
        return max(0.0, self._besides("parts") - bare_s) / (_SEVERAL - 1) / self.network.crowding(self.network.world)

    def of_sharded_states(self) -> dict[str, float]:
        """Return what sharding the optimizer's state costs a step, and gradients, for each part but the first."""
        optimizer_s = self._besides("optimizer")
        more_s = max(0.0, self._besides("gradients in parts", "parts") - optimizer_s)
        wait = waiting(self.network.world)
        return {"optimizer_shard_s": optimizer_s / wait, "gradient_shard_s": more_s / (_SEVERAL - 1) / wait}

    def of_sharded_parameters(self) -> dict[str, float]:
        """Return what a block costs, what more where ranks compute, each of its tensors, and gathering's rate."""
        ranks = self.network.world
        one, several, large = (
            self._besides(f"{prefix}parameters", than) / _BLOCKS
            for prefix, than in (("", "plain"), ("several ", "several"), ("wide ", "wide"))
        )
        tensor_s = max(0.0, several - one) / (2 * _SEVERAL - 2)
        hidden = self._besides("much") / _BLOCKS if self.prefetch else 0.0
        more = max(0.0, self._besides("much parameters", "much") / _BLOCKS - max(0.0, large - one - hidden) - one)
        thin_s, wide_s = (
            sum(
                times * self.network.collective(kind, 4.0 * width * width, ranks, 1, self.constants).seconds
                for kind, times in (("all_gather", 2), ("reduce_scatter", 1))
            )
            for width in (_THIN, _WIDE)
        )
        crowd = self.network.crowding(ranks)
        alone = 1.0 / crowd / waiting(ranks)
        return {
            "fetch_share": min(1.0, max(0.02, (wide_s - thin_s) / max(1e-9, large - one))),
            "block_s": max(0.0, one - thin_s - 2 * tensor_s) * alone,
            "block_wait_s": more * alone,
            "block_computed_s": self._besides("much") / _BLOCKS,
            "tensor_s": tensor_s / crowd,
        }

    def of_exchanges(self) -> dict[str, float]:
        """Return what an exchange of ranks that share tensors costs, and what it reaches of its rate."""
        count, thin_wire = self._exchanges("exchanges")
        exchange_s = max(0.0, self._besides("exchanges") - thin_wire) / count
        # The same is computed in more exchanges, while all ranks compute. The gradients are the same, too: reducing
        # those of more layers between hosts would take far longer than the exchanges do.
        count, wire = self._exchanges("much divided")
        more, more_wire = self._exchanges("often divided")
        loop_s = self._besides("parts")
        often_s = self._besides("often divided", "much divided") - loop_s - more_wire + wire
        exchange_s = max(exchange_s, often_s / (more - count))
        sent = self._besides("much divided", "much") - count * exchange_s
        return {
            "exchange_s": exchange_s / waiting(degrees(self.network.world)[0]),
            "exchange_share": min(1.0, max(0.05, wire / max(1e-9, sent))),
        }

    def _besides(self, probe: str, than: str = "plain") -> float:
        """By how much a probe takes longer than another."""
        return max(0.0, self.took[probe] - self.took[than])

    def _exchanges(self, name: str) -> tuple[int, float]:
        """Of a divided chain, how many exchanges there are in a step, and what their collectives take."""
        probe, degree = self.probes[name], degrees(self.network.world)[0]
        with torch.device("meta"):  # where no random numbers are drawn
            batch = torch.zeros(probe.rows * degree // probe.plan.accumulate, probe.width)
            meta: Workload = capture(_model(probe), batch, degrees=[degree])
        made = [one for layer in meta.layers for one in layer.share(degree).exchanges]
        wire = sum(
            one.count * self.network.collective(one.kind, one.nbytes, degree, 1, self.constants).seconds for one in made
        )
        return probe.plan.accumulate * sum(one.count for one in made), probe.plan.accumulate * wire


def _probes(ranks: int) -> dict[str, _Probe]:
    """Return what is measured, by name."""
    degree = degrees(ranks)[0]
    thin, wide = (width if width % degree == 0 else width * degree for width in (_THIN, _WIDE))
    divided = Plan(tensor_parallel_degree=degree)
    stages = _stages(ranks)
    probes = {
        "plain": _Probe(),
        "several": _Probe(layers=_SEVERAL),
        "wide": _Probe(width=_WIDE),
        "optimizer": _Probe(Plan(shard="optimizer")),
        "parts": _Probe(Plan(accumulate=_SEVERAL)),
        "gradients in parts": _Probe(Plan(accumulate=_SEVERAL, shard="gradients")),
        "parameters": _Probe(Plan(shard="parameters")),
        "several parameters": _Probe(Plan(shard="parameters"), layers=_SEVERAL),
        "wide parameters": _Probe(Plan(shard="parameters"), width=_WIDE),
        "exchanges": _Probe(divided, width=thin),
        "much": _Probe(width=wide, rows=_MANY_ROWS),
        "much divided": _Probe(divided, width=wide, rows=_MANY_ROWS),
        "often divided": _Probe(dataclasses.replace(divided, accumulate=_SEVERAL), width=wide, rows=_MANY_ROWS),
        "much parameters": _Probe(Plan(shard="parameters"), width=wide, rows=_MANY_ROWS),
    }
    if ranks % stages == 0:
        for count in (_FEW, _MANY):
            plan = Plan(pipeline_parallel_degree=stages, micro_batches=count)
            probes[f"{count} micro-batches"] = _Probe(plan)
            probes[f"{count} large micro-batches"] = _Probe(plan, width=wide, rows=_MANY_ROWS)
    return probes


def _stages(ranks: int) -> int:
    """Of the pipelines that are tried; a divisor of the ranks, if there is a small one."""
    return next((p for p in (2, 3) if ranks % p == 0), min(ranks, _BLOCKS))


def degrees(ranks: int) -> list[int]:
    """Return numbers of ranks that could divide tensors."""
    return [degree for degree in range(2, ranks + 1) if ranks % degree == 0]


class _Chain(torch.nn.Module):
    """A block of some small layers; without a list, whose elements would be blocks themselves."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(str(number), torch.nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _model(probe: _Probe) -> torch.nn.Module:
    return torch.nn.Sequential(*(_Chain(probe.layers, probe.width) for _ in range(probe.blocks)))


def in_turns(
    steps: Sequence[Callable[[], Any]],
    device: torch.device,
    world: World,
    *,
    turns: int,
    together: int,
    long_s: float,
    until_s: float = math.inf,
    hopeless: float = math.inf,
) -> list[float]:
    """Return seconds of a step of each, on the rank that is the slowest in that step; a collective operation.

    Each has `turns` turns of `together` steps, of several the first not counted, which finds the caches as another left
    them; of single steps those of the first turn are not counted, which set up what later ones find. Where steps take
    long there are fewer turns, `long_s` of those that count, and none begins after the instant `until_s`
    (`time.perf_counter` of rank 0) but the first that count: two of single steps, one of several. What takes `hopeless`
    times as long as the fastest has these only.
    """
    cold, fewest = (1, 2) if together == 1 else (0, 1)
    each: list[list[float]] = [[] for _ in steps]
    going = list(range(len(steps)))
    for turn in range(turns):
        for number in going:
            took = [timed(steps[number], device, world) for _ in range(together)]
            each[number] += took[min(1, together - 1) :]
        if turn + 1 < cold + fewest:
            continue
        spent_s = sum(sum(own[cold:]) for own in each)
        if world.from_root(spent_s > long_s or time.perf_counter() > until_s):
            break
        shortest_s = min((_undisturbed(own[cold:]) for own in each), default=0.0)
        going = world.from_root([one for one in going if _undisturbed(each[one][cold:]) <= hopeless * shortest_s])
    every = zip(*world.from_all([own[cold:] for own in each]), strict=True)  # of each, what its steps took every rank
    return [_undisturbed([max(ranks) for ranks in zip(*own, strict=True)]) for own in every]


def _step(probe: _Probe, device: torch.device, world: World) -> Callable[[], Any]:
    with torch.random.fork_rng(devices=[]):  # it is made on the CPU; asking a GPU for its state would open one
        model = _model(probe).to(device)
    batch = torch.zeros(probe.rows * world.size, probe.width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with redirect_stderr(io.StringIO()):  # what is said of a model that is none of the user's
        trainer = Trainer(model, torch.nn.functional.mse_loss, optimizer, probe.plan, sample=batch[:2])
    return partial(without_loss_check(trainer).step, (batch, batch))


def _passes(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """Run the passes of all parts of a batch but one, without a Trainer."""
    for _ in range(_SEVERAL - 1):
        torch.nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call, unused-ignore]


def timed(work: Callable[[], Any], device: torch.device, world: World) -> float:
    """Return seconds that this rank's part of some work takes, which all ranks begin together."""
    dist.barrier(group=world.group)
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def usual(each: list[float]) -> float:
    """Return what is undisturbed, without the first two, which set up what later ones find."""
    return _undisturbed(each[min(2, len(each) - 1) :])


def _undisturbed(each: list[float]) -> float:
    """Return what a step takes that hardly anything disturbs, of up to four the least: what does makes it longer."""
    return sorted(each)[(len(each) - 1) // 4]
