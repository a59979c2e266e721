"""A plan's step as tasks for the simulator: what `_time.py` has in closed form, on every rank and link."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from hocket.algorithms import direct, get, ring
from hocket.cluster import Cluster
from hocket.schedule import Collective, Schedule
from hocket.schedule.pipeline import PipelineAction
from hocket.simulate import StepGraph, Work, simulate_step
from hocket.workload import Workload

from ..axes import copy_group, replicas, shard_group, sharing
from ..network import Constants, Cost, network_of
from ..plan import BucketSizes, Plan, plan_order
from ._ends import bucket_count, buckets, fetched
from ._memory import memory_of
from ._profile import LayerTimes, Profile, in_precision
from ._stages import layers_by_rank
from ._time import cuts_of, predict

Pick = Callable[[Collective, float], Schedule]

_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
# All of the links is reached.
_PLAIN = Constants(inside_share=1.0, network_share=1.0, collective_s=0.0)


def step_graph(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    *,
    workers: int,
    batch: int,
    constants: Constants | None = None,
    pick: Pick | None = None,
) -> StepGraph:
    """One training step of a plan, for `hocket.simulate.simulate_step`.

    Gradients are reduced in buckets while the last backward pass goes on; sharded parameters are gathered block by
    block, the next while one is computed. An exchange between workers that share tensors is simulated by itself, all
    groups at once, and stands as a span for all layers of a pass, since no rank computes meanwhile. The links have the
    cluster's own rates: what the constants say is not reached of them passes them as more bytes. What no link shows,
    jitter and the loop of a step, is the closed form's, behind the passes.

    Args:
        plan: Any that `workers` can carry out.
        workload: What is trained.
        cluster: Where.
        workers: How many.
        batch: Samples of a global batch.
        constants: What is reached, as for `predict`.
        pick: The schedule of a collective of so many bytes; the closed forms' choice if not given.

    Raises:
        PlanError: the plan breaks a rule, or cannot be simulated.
    """
    network = network_of(cluster).first(workers)
    constants = constants or Constants.of(network.reached)
    known = predict(plan, workload, cluster, workers=workers, batch=batch, constants=constants)
    plan, workload = plan.resolve(workers), in_precision(plan, workload)
    d, t = plan.data_parallel_degree, sharing(plan)[1]
    m = plan.micro_batches * plan.accumulate
    made = _Simulated(workload, network, constants).on(cluster, pick).of(plan)
    micro = -(-batch // (d * m))
    # The plan is cut as the closed form cuts it.
    profile = Profile(workload, network, constants).of(plan)
    cuts = cuts_of(plan, profile, profile.times(plan, micro).total, micro)
    # memory_of reads the plan on one worker of each stage
    nbytes = [
        memory_of(plan, profile.workload, batch=batch, cuts=cuts, rank=rank, sharers=network.sharers).total
        for rank in range(plan.pipeline_parallel_degree)
    ]
    graph = StepGraph(workers, memory_nbytes=np.repeat(nbytes, d * t) if any(cluster.memory_nbytes) else None)
    parts = known.parts
    _GraphOfStep(graph, plan, made, made.times(plan, micro), [0, *cuts, len(profile.workload.layers)], micro).add(
        parts.straggle + parts.interference + parts.crowding + parts.overhead
    )
    return graph


class _Simulated(Profile):
    """Layers whose exchanges are simulated on the cluster's links instead of taken from closed forms."""

    def on(self, cluster: Cluster, pick: Pick | None) -> "_Simulated":
        """Say where, and with which schedules."""
        self._where, self._pick = cluster, pick
        self._taken: dict[tuple[str, float, int], float] = {}
        return self

    def of(self, plan: Plan) -> "_Simulated":
        """See `Profile.of`."""
        found = super().of(plan)
        assert isinstance(found, _Simulated)
        return found.on(self._where, self._pick)

    def schedule(
        self, kind: str, nbytes: float, size: int, stride: int, constants: Constants
    ) -> tuple[Schedule, float]:
        """Return what a group plays, and of how many bytes."""
        if self._pick:
            return self._pick(Collective(kind, size), nbytes), nbytes
        cost = self.network.collective(kind, nbytes, size, stride, constants)
        made = self._made(cost, Collective(kind, size), stride)
        best = self.network.collective(kind, nbytes, size, stride, _PLAIN, only=(cost.algorithm, cost.given))
        moved = best.seconds - best.latency_s
        return made, nbytes * ((cost.seconds - cost.latency_s) / moved if moved else 1.0)

    def _made(self, cost: Cost, collective: Collective, stride: int) -> Schedule:
        """Return the schedule of a cost.

        Where rates are those of two hosts, a cost counts all links of a mesh, and all ports that a ring can pass.
        """
        local, hosts, _ = self.network.members(collective.world, stride)
        if not self.network.routes(collective.world, stride):
            if hosts == 1 and self.network.mesh:
                return direct(collective)
            if cost.algorithm == "ring" and hosts > 1 and local > 1:
                # A ring for each member of a host, which enters and leaves hosts at the same place. In a mesh each
                # takes other links: to and fro around the place where it enters (Walecki's zigzag).
                orders = []
                way = np.arange(local)
                if self.network.mesh:
                    way = (way + 1) // 2 * np.where(way % 2, 1, -1)
                for turn in range(local):
                    ranks = np.arange(collective.world).reshape(hosts, local)[:, (way + turn) % local]
                    ranks[1::2] = ranks[1::2, ::-1]
                    orders.append(ranks.ravel())
                return ring(collective, orders=orders)
        return get(cost.algorithm)(collective, **dict(cost.given))

    def _wire(self, kind: str, nbytes: float, tensor: int) -> float:
        if tensor == 1 or nbytes <= 0:
            return 0.0
        key = kind, nbytes, tensor
        if key not in self._taken:
            schedule, moved = self.schedule(kind, nbytes, tensor, 1, self.constants)
            graph = StepGraph(self.network.world)
            for first in range(0, self.network.world, tensor):
                graph.collective(schedule, moved, ranks=np.arange(first, first + tensor))
            self._taken[key] = simulate_step(graph, self._where).seconds + self.constants.collective_s
        return self._taken[key]


class _GraphOfStep:
    """One step under way: what each rank of the pipeline has been given to do so far."""

    def __init__(
        self, graph: StepGraph, plan: Plan, profile: _Simulated, times: LayerTimes, edges: list[int], micro: int
    ) -> None:
        self.graph, self.plan, self.profile, self.times, self.edges = graph, plan, profile, times, edges
        p, d = plan.pipeline_parallel_degree, plan.data_parallel_degree
        self.places = np.arange(graph.world).reshape(p, d, -1)
        self.copies, self.stride = replicas(plan)
        # Of each rank the gradients of blocks that ranks with the same shard average, as far as they are reduced.
        self.reduced: list[list[tuple[float, list[Work]]]] = [[] for _ in range(p)]
        self.order = plan_order(plan)
        self.scale = micro / profile.workload.batch
        self.arrived: dict[tuple[bool, int, int], list[Work]] = {}
        self.reductions: list[list[Work]] = [[] for _ in range(p)]
        # Of each rank what it computed last, and its last message to every other one.
        self.last: list[list[Work]] = [[] for _ in range(p)]
        self.leaving: list[dict[int, Work]] = [{} for _ in range(p)]
        self.limits = [self._limit(rank) for rank in range(p)]
        # Of each rank, for blocks that are gathered: what was computed before the last block, and that block's gather.
        self.before: list[list[Work]] = [[] for _ in range(p)]
        self.computed: list[list[Work]] = [[] for _ in range(p)]
        # The gradients that its last block has left: bytes, whether they are complete, and what they come from.
        self.left: list[tuple[float, bool, list[Work]] | None] = [None] * p
        back = times.backward + times.again
        self.seconds = {
            "F": times.forward + times.tensor_forward,
            "B": back + times.tensor_backward,
            "I": back - times.backward / 2 + times.tensor_backward,
            "W": times.backward / 2,
        }
        # What completes a stage's gradients: its last whole backward, or the last half for its weights.
        self.completes = {one.stage: one for rank in self.order.ranks for one in rank if one.kind in ("B", "W")}

    def add(self, behind_s: float) -> None:
        """Add all of it; `behind_s` come behind the passes of every rank."""
        for rank, action in self.order.played.sequence:
            self._action(rank, action)
        for rank in range(len(self.places)):
            self._reduce_left(rank)
            if self.copies > 1 and self.plan.shard != "parameters" and len(self.places) > 1:
                self._reduce_all(rank)
            for nbytes, after in self.reduced[rank]:
                self.reductions[rank] += self._collective(rank, "all_reduce", nbytes, "gradients of copies", after)
        held = self.profile.held(self.plan).trained_bytes
        for rank in range(len(self.places)):
            own = self._own(rank)
            where, after = self.places[rank].ravel(), self.reductions[rank]
            if behind_s:
                after = [self.graph.compute(where, behind_s, name="what no link shows", after=after)]
            seconds = self.profile.update_s(self.plan, own)
            updated = self.graph.compute(where, seconds, name="optimizer", after=after)
            if self.copies > 1 and self.plan.shard in ("optimizer", "gradients"):
                self._collective(rank, "all_gather", float(held[own].sum()), "parameters", [updated])

    def _own(self, rank: int) -> NDArray[np.int64]:
        return layers_by_rank(self.plan, self.edges)[rank]

    def _limit(self, rank: int) -> float:
        sizes = self.profile.held(self.plan).gradient_bytes[self._own(rank)]
        return BucketSizes.choose(float(sizes.sum()), self.plan.bucket_bytes).most

    def _collective(
        self, rank: int, kind: str, nbytes: float, name: str, after: Iterable[Work], stream: str = "network"
    ) -> list[Work]:
        """Add a collective of every group of a stage's ranks that hold the same parameters."""
        constants = self.profile.constants
        if self.plan.shard == "parameters" and kind != "all_reduce":
            constants = fetched(constants)
        found = []
        if nbytes:
            size, stride = replicas(self.plan)
            if self.plan.shard == "parameters":
                size, stride = copy_group(self.plan) if kind == "all_reduce" else shard_group(self.plan)
            schedule, moved = self.profile.schedule(kind, nbytes, size, stride, constants)
            members = self.places[rank].reshape(-1, size, stride)
            for group in np.moveaxis(members, 1, 2).reshape(-1, size):
                if constants.collective_s:
                    after = [*after, self.graph.compute(group, constants.collective_s, stream=stream, after=after)]
                label = f"{name} ({schedule.name})"
                found.append(
                    self.graph.collective(schedule, moved, ranks=group, stream=stream, name=label, after=after)
                )
        return found

    def _action(self, rank: int, action: PipelineAction) -> None:
        stage, kind, number = action
        where, forward = self.places[rank].ravel(), kind == "F"
        came = self.arrived.get((forward, stage, number), []) if kind != "W" else []
        name = f"{_NAMES[kind]} {number}"
        again = self.plan.shard == "gradients" and self.plan.accumulate > 1
        if self.copies > 1 and self.plan.shard == "parameters":
            last = self._by_block(rank, action, came, name)
        elif self.copies > 1 and len(self.places) == 1 and (action == self.completes[stage] or (again and not forward)):
            last = self._reduced(rank, stage, self.seconds[kind], came)
        else:
            layers = slice(self.edges[stage], self.edges[stage + 1])
            after = [*came, *self.reductions[rank]] if again else came  # parts do not overlap
            last = self.graph.compute(where, float(self.seconds[kind][layers].sum()), name=name, after=after)
        self.last[rank] = [last]
        onward = stage + (1 if forward else -1)
        if kind != "W" and self.order.apart(min(stage, onward)):
            self.arrived[forward, onward, number] = self._sent(rank, stage, onward, name, last)

    def _reduce_all(self, rank: int) -> None:
        """Reduce the gradients of all stages of a rank, bucket by bucket, when its messages have left."""
        nbytes = float(self.profile.held(self.plan).gradient_bytes[self._own(rank)].sum())
        count = bucket_count(nbytes, self.plan, self.profile.constants)
        kind = "all_reduce" if self.plan.shard == "none" else "reduce_scatter"
        after = [*self.last[rank], *self.leaving[rank].values()]
        for _ in range(count):
            self.reductions[rank] += self._collective(rank, kind, nbytes / count, "gradients", after)

    def _sent(self, rank: int, stage: int, onward: int, name: str, last: Work) -> list[Work]:
        """Send to the next stage, where ranks that share tensors wait for what each of them gets."""
        plan, profile = self.plan, self.profile
        target, stride = self.order.home(onward), self.places[0].size
        whole = float(profile.output_bytes[self.edges[max(stage, onward)] - 1]) * self.scale
        there = self.places[target].ravel()
        pair = self.order.home(min(stage, onward)), self.order.home(max(stage, onward))
        rates = [
            profile.network.links(stride, (pair,), profile.network.local, one)[0].rate_Bps
            for one in (_PLAIN, profile.constants)
        ]
        more = rates[0] / rates[1] / profile.constants.message_share
        parts = profile.message_parts(plan, whole)
        here = self.places[rank].ravel()
        sent = self.graph.send(here, there, whole / parts * more, name=name, after=[last])
        self.leaving[rank][target] = Work(here, sent.nodes)
        if parts > 1 and not plan.sequence_parallel:  # those who get the parts collect the whole
            seconds = profile._wire("all_gather", whole, parts)
            sent = self.graph.compute(
                there, seconds, stream=f"from stage {stage}", name="parts of a message", after=self._of_all(sent)
            )
        return self._of_all(sent)

    def _of_all(self, work: Work) -> list[Work]:
        """Return what every rank waits for that waits for a work of all the ranks with which it shares tensors."""
        nodes = work.nodes.reshape(-1, self.places.shape[2])
        return [Work(work.ranks, np.roll(nodes, -turn, axis=1).ravel()) for turn in range(nodes.shape[1])]

    def _reduced(self, rank: int, stage: int, seconds: NDArray[np.float64], after: Iterable[Work]) -> Work:
        """Return the last backward pass of a stage, whose gradients are reduced bucket by bucket."""
        where, base, last = self.places[rank].ravel(), self.edges[stage], None
        sizes = self.profile.held(self.plan).gradient_bytes[base : self.edges[stage + 1]]
        kind = "all_reduce" if self.plan.shard == "none" else "reduce_scatter"
        late: list[float] = []
        for first, end, count, nbytes in buckets(sizes, self.limits[rank]):
            spent = float(seconds[base + first : base + end].sum())
            last = self.graph.compute(where, spent, name="backward", after=after)
            if not self.profile.constants.overlap:
                late += count * [nbytes / count]
                continue
            for _ in range(count):
                self.reductions[rank] += self._collective(rank, kind, nbytes / count, "gradients", [last])
        assert last is not None
        for nbytes in late:
            self.reductions[rank] += self._collective(rank, kind, nbytes, "gradients", [last])
        return last

    def _by_block(self, rank: int, action: PipelineAction, came: list[Work], name: str) -> Work:
        """Return a pass through a stage whose blocks are gathered, each while the one before is computed.

        Where nothing overlaps, each is gathered when the one before is computed and its gradients are reduced.
        """
        stage, kind, _ = action
        ahead = self.profile.constants.overlap and self.profile.constants.prefetch
        layers = np.arange(self.edges[stage], self.edges[stage + 1])
        held, where = self.profile.held(self.plan), self.places[rank].ravel()
        gathered_bytes, each = held.parameter_bytes - self.times.narrowed, self.seconds
        passing = np.ones(len(gathered_bytes)) if kind == "F" else each["B"]
        columns = (gathered_bytes, held.gradient_bytes, passing, each[kind])
        blocks = list(zip(*(self.profile.by_block(one[layers], layers).tolist() for one in columns), strict=True))
        work: Work | None = None
        for parameters, gradients, passed, seconds in blocks if kind == "F" else reversed(blocks):
            # Nothing is gathered again where nothing is passed back, since all up to there is frozen.
            nbytes = parameters if passed else 0.0
            gathered = self._collective(rank, "all_gather", nbytes, "parameters", self.before[rank])
            self._reduce_left(rank)
            work = self.graph.compute(where, seconds, name=name, after=[*came, *gathered])
            self.before[rank] = [*self.computed[rank], *gathered]
            self.computed[rank] = [work]
            self.left[rank] = (gradients, action == self.completes[stage], [work]) if kind in ("B", "W") else None
            if not ahead:
                self.before[rank] = self._reduce_left(rank) or [work]
        assert work is not None
        return work

    def _reduce_left(self, rank: int) -> list[Work]:
        """Reduce the gradients that a rank's last block has left, among copies too if they are complete."""
        left, self.left[rank] = self.left[rank], None
        if left is None:
            return []
        nbytes, complete, after = left
        found = self._collective(rank, "reduce_scatter", nbytes, "gradients", after)
        self.reductions[rank] += found
        size = copy_group(self.plan)[0]
        if complete and size > 1:
            part = nbytes * size / self.copies
            if len(self.places) > 1:  # whose last pass nobody knows beforehand
                self.reduced[rank].append((part, found))
            else:
                # On a stream of its own, as FSDP2's `all_reduce_stream`: the next block's gather does not wait for it.
                name, stream = "gradients of copies", "copies"
                self.reductions[rank] += self._collective(rank, "all_reduce", part, name, found, stream)
        return found
