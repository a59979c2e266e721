"""A pipeline whose parameters are sharded, followed: blocks are gathered through the ports that messages pass, too."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from hocket.simulate import StageWork, Stream

from ..axes import AXES, product, shard_group
from ..network import LinkMeeting
from ..plan import Plan, plan_homes, plan_order
from ._ends import block_times, copies_times, fetched, inside, talking
from ._pipeline import Followed
from ._profile import LayerTimes, Profile
from ._stages import layers_by_rank

_Block = tuple[float, float, float, float, float]  # see `block_times`


def follow_gathers(
    plan: Plan,
    profile: Profile,
    times: LayerTimes,
    edges: Sequence[int],
    works: Sequence[StageWork],
    plain: Followed,
    most_s: float,
) -> Followed:
    """Follow a pipeline whose parameters are sharded: each block is gathered while the one before is computed.

    A message shares links with the gathers that are under way at both of its ends (`Contention.meeting`). `works` say
    what messages take, and `plain`, the same pipeline without gathers, how long they share links with each other. As
    many micro-batches are followed as of that one; each round of the rest takes as long as the last one.
    Its ranks share links with each other while they gather at once. When that is shows where each gathers as if it
    were alone, and then, since that moves what follows, where they share them so. What takes longer than `most_s` even
    so is not looked at again.
    """
    p, m, few = plan.pipeline_parallel_degree, plan.micro_batches, plain.followed
    meetings = _meetings(plan, profile, times, edges, works)
    stages = _stages(plan, profile, times, edges, np.eye(p))
    found, links = _followed(plan, profile, times, edges, stages, works, meetings, plain, few)
    shared = found.seconds <= most_s and stages != _stages(plan, profile, times, edges, np.ones((p, p)))
    for _ in range(2 if shared else 0):
        stages = _stages(plan, profile, times, edges, _together([link.busy for link in links]))
        found, links = _followed(plan, profile, times, edges, stages, works, meetings, plain, few)
    if few == m:
        return found
    shorter, _ = _followed(plan, profile, times, edges, stages, works, meetings, plain, few - p)
    rest_s = (m - few) / p * (found.seconds - shorter.seconds)
    return found.later(max(rest_s, least_fetched(plan, profile, times, edges, m) - found.seconds))


def least_fetched(plan: Plan, profile: Profile, times: LayerTimes, edges: Sequence[int], micro_batches: int) -> float:
    """Return the least that a pipeline of so many micro-batches takes: each rank gathers and reduces one by one.

    All but the last two reductions come before its last block is computed. `follow_gathers` never says less, and
    takes much longer to say it.
    """
    p = plan.pipeline_parallel_degree
    blocks, _ = _stages(plan, profile, times, edges, np.eye(p))
    spent, last = [0.0] * p, [0.0] * p
    for home, stage in zip(plan_homes(plan), blocks, strict=True):
        spent[home] += sum(gather + again + reduce for gather, again, reduce, _, _ in stage)
        last[home] = max(last[home], *(reduce for _, _, reduce, _, _ in stage))
    return max(micro_batches * one - 2 * reduce for one, reduce in zip(spent, last, strict=True))


def _followed(
    plan: Plan,
    profile: Profile,
    times: LayerTimes,
    edges: Sequence[int],
    stages: tuple[list[list[_Block]], list[float]],
    works: Sequence[StageWork],
    meetings: Mapping[tuple[int, int, int], LinkMeeting],
    plain: Followed,
    few: int,
) -> tuple[Followed, "list[_SharedPort]"]:
    """Return what `follow_gathers` does, of the first few micro-batches alone, and the ranks' links."""
    p, constants = plan.pipeline_parallel_degree, profile.constants
    ahead = constants.overlap and constants.prefetch
    blocks, averages = stages
    weights = [float(times.backward[a:b].sum()) / 2 for a, b in itertools.pairwise(edges)]
    whole = [sum(one[4] for one in stage) for stage in blocks]
    ranks, links = [Stream() for _ in range(p)], [_SharedPort() for _ in range(p)]
    begun, left = [0.0] * p, [0.0] * p  # when a rank's last block began, and the reduction that its end asks for
    came: dict[tuple[bool, int, int], float] = {}
    order = plan_order(dataclasses.replace(plan, micro_batches=few))
    # Of each rank what its gathers take, those of a block after those of its action's blocks before.
    coming = [[one[a.kind != "F"] for a in own for one in _in_order(blocks[a.stage], a.kind)] for own in order.ranks]
    for number, (stage, kind, micro) in order.played.sequence:
        rank, link = ranks[number], links[number]
        forward, onward = kind == "F", stage + (1 if kind == "F" else -1)
        part = weights[stage] / whole[stage] if whole[stage] else 0.0
        part = {"F": 1.0, "B": 1.0, "I": 1 - part, "W": part}[kind]
        after = came.get((forward, stage, micro), 0.0) if kind != "W" else 0.0
        for gather, again, reduce, ahead_s, back_s in _in_order(blocks[stage], kind):
            there = link.add(gather if forward else again, begun[number] if ahead else rank.free_s)
            if left[number]:
                link.add(left[number], rank.free_s)
            begun[number] = max(rank.free_s, there)
            rank.add(ahead_s if forward else part * back_s, max(there, after))
            left[number] = reduce if kind in ("B", "W") else 0.0
            if left[number] and not ahead:
                rank.free_s, left[number] = link.add(reduce, rank.free_s), 0.0
        del coming[number][: len(blocks[stage])]
        link.coming = coming[number][: 2 if ahead else 1]
        if kind != "W" and 0 <= onward < len(blocks):
            hop, way_s = works[min(stage, onward)].hop, plain.ways_s[forward, onward, micro]
            if order.apart(min(stage, onward)):
                meets = [(one, meetings[stage, onward, one]) for one in (number, order.home(onward))]
                asked, more_s = begun if ahead else [rank.free_s for rank in ranks], 0.0
                for one, meeting in meets:
                    if meeting.message < 1:
                        busy_s = max(0.0, links[one].busy_until(asked[one], ranks[one].free_s) - rank.free_s)
                        # Behind that gather the next one is asked for: the message seldom has the port alone again.
                        more_s = max(more_s, (1 / meeting.message - 1) * min(hop, busy_s))
                for one, meeting in meets:
                    if meeting.collective < 1:
                        bisect.insort(links[one].passed, (rank.free_s, rank.free_s + hop + more_s, meeting.collective))
                way_s += more_s
            came[forward, onward, micro] = rank.free_s + way_s
    ends = tuple(rank.free_s for rank in ranks)
    for link, rank, more, average in zip(links, ranks, left, averages, strict=True):
        link.add(more, rank.free_s)
        link.add(average, rank.free_s)
    found = Followed(max(ends), ends, ends, few)
    return dataclasses.replace(found, links=tuple(link.free_s for link in links)), links


def _meetings(
    plan: Plan, profile: Profile, times: LayerTimes, edges: Sequence[int], works: Sequence[StageWork]
) -> dict[tuple[int, int, int], LinkMeeting]:
    """Return what is left of a message and of a rank's gathers that meet, by the message's stages and the rank.

    Where links are unknown, both have half of the port if they pass the same one.
    """
    size, stride = shard_group(plan)
    port, homes = int(inside(profile, (size, stride))), plan_homes(plan)
    ranks = product(plan, *AXES[1:])
    gathered, constants = profile.held(plan).parameter_bytes - times.narrowed, fetched(profile.constants)
    most = [float(profile.by_block(gathered[a:b], np.arange(a, b)).max()) for a, b in itertools.pairwise(edges)]
    found = {}
    for stage, work in enumerate(works[:-1]):
        for here, there in ((stage, stage + 1), (stage + 1, stage)):
            pair = homes[here], homes[there]
            for end in (here, there):
                apart = LinkMeeting(*(0.5, 0.5) if work.port == port else ())
                if pair[0] != pair[1]:
                    meeting = profile.network.meeting((most[end], size, stride), pair, ranks, homes[end], constants)
                    found[here, there, homes[end]] = meeting or apart
    return found


def _together(busy: Sequence[Sequence[tuple[float, float]]]) -> np.ndarray:
    """Return how much links do for each other rank, by column, while they do a rank's own work, which is 1.

    Who is busy at a time, of which `busy` tells begins and ends, is served evenly.
    """
    points = [np.array(one).ravel() for one in busy]
    times = np.unique(np.concatenate(points))
    active = np.array([np.searchsorted(one, times[:-1], side="right") % 2 for one in points])
    served = (active * np.diff(times) / np.maximum(active.sum(axis=0), 1)) @ active.T
    found: np.ndarray = served / np.maximum(np.diag(served), 1e-12)[:, None]
    np.fill_diagonal(found, 1.0)
    return found.round(2)


def _stages(
    plan: Plan, profile: Profile, times: LayerTimes, edges: Sequence[int], talk: np.ndarray
) -> tuple[list[list[_Block]], list[float]]:
    """Return the blocks of every stage, and of every rank how long copies of its shards average their gradients."""
    p, held = plan.pipeline_parallel_degree, profile.held(plan).parameter_bytes
    homes, sizes = plan_homes(plan), [float(held[layers].sum()) for layers in layers_by_rank(plan, edges)]
    passes = plan.micro_batches * plan.stages_per_rank
    busy = passes / (passes + p - 1)  # each rank waits for the pipeline to fill, and is silent, at another time
    blocks: list[list[_Block]] = []
    averages = [0.0] * p
    for stage, (first, end) in enumerate(itertools.pairwise(edges)):
        own, parts = talking(sizes, homes[stage])
        beside = own, tuple(part if rank == own else round(busy * part, 2) for rank, part in enumerate(parts))
        layers = np.arange(first, end)
        others = own, tuple(talk[own].tolist())
        columns = block_times(plan, profile, times, layers, others)
        averages[homes[stage]] += float(copies_times(plan, profile, layers, beside).sum())
        blocks.append(list(zip(*(one.tolist() for one in columns), strict=True)))
    return blocks, averages


def _in_order(blocks: list[_Block], kind: str) -> list[_Block]:
    """Return the blocks of a stage as an action of this kind goes through them."""
    return blocks if kind == "F" else blocks[::-1]


class _SharedPort(Stream):
    """The port of a rank, of which a message that passes to or fro leaves a part to gathers and reductions."""

    __slots__ = ("busy", "coming", "passed")

    def __init__(self) -> None:
        super().__init__()
        # when messages pass, from and to, in order, and what they leave to gathers
        self.passed: list[tuple[float, float, float]] = []
        self.busy: list[tuple[float, float]] = []  # when it gathers and reduces, from and to, in order
        self.coming: list[float] = []  # what the gathers take that will be asked for next, at most two

    def busy_until(self, asked_s: float, computed_s: float) -> float:
        """Return when the next gathers are there: the second is asked for when the first is there, and all computed."""
        now = self.free_s
        for seconds in self.coming:
            now, asked_s = self._end(seconds, max(now, asked_s)), computed_s
        return now

    def add(self, seconds: float, after: float = 0.0) -> float:
        """See `Stream.add`."""
        begin = max(self.free_s, after)
        self.free_s = self._end(seconds, begin)
        self.busy.append((begin, self.free_s))
        return self.free_s

    def _end(self, seconds: float, now: float) -> float:
        """Return when what is asked for is there, if it begins now, which is not before the port is free."""
        while self.passed and self.passed[0][1] <= self.free_s:
            del self.passed[0]
        for begin, end, rate in self.passed:
            if begin >= now + seconds:
                break
            if begin > now:
                now, seconds = begin, seconds - (begin - now)
            if end > now:
                shared = min(seconds / rate, end - now)
                now, seconds = now + shared, seconds - shared * rate
        return now + seconds
