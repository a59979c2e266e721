"""A cluster as closed forms see it: ranks in hosts, a wire inside and a wire between, and what collectives take.

The costs are those of the algorithms' own closed forms (`hocket.algorithms`), of which the fastest is taken. In small
worlds the links that a group really uses say what is reached of the rates (`_contention.py`).
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hocket.algorithms import algorithms
from hocket.cluster import Cluster
from hocket.schedule import Collective

from ._balance import Link
from ._constants import Constants
from ._contention import MOST_MEASURED, MOST_RANKS, Contention, LinkMeeting, StageMessages
from ._cost_lines import NOTHING, Cost, CostLine, fastest_astray, forms_of
from ._wires import FIGURES, wires_of

_RATES = ("inside_Bps", "inside_s", "host_Bps", "rank_Bps", "between_s")


@dataclass(frozen=True)
class Network:
    """The wires of a cluster. Made by `Network.of`.

    Attributes:
        name: Of the cluster.
        world: Ranks that there are.
        local: Ranks on each host.
        inside_Bps: The least that two neighbours in a host reach.
        inside_s: Their latency.
        host_Bps: What all ports of a host carry together.
        rank_Bps: What one rank reaches to another host alone.
        between_s: Latency from host to host.
        flops: Of a device, 0 if unknown.
        memory_Bps: Of a device, 0 if unknown.
        memory_nbytes: Of a device, 0 if unknown.
        reduces: Whether switches reduce: streaming share of the link, 0 if they do not.
        at_once: How many ranks can compute at full speed at once, if they share processors; 0 for all.
        mesh: Links of a rank, where the ranks of a host are joined each to each by links of their own: `inside_Bps` is
            of all of them together, and a group of some ranks uses its own only. 0 elsewhere.
        reached: What trainings reach of the nominal rates, by names of constants (`Constants.of`).
        sharers: How many ranks are processes in the memory of one host; 0 for devices with memory of their own.
        routed: The cluster, whose routes say what groups reach, unless rates were changed by hand.
        float8_flops: Of a device's matrix products in float8, 0 if it has none or they are unknown.
        float16_flops: Of its products in float16, 0 if as in bfloat16, which is `flops`.
        tf32_flops: Of its products in TF32, 0 if it has none or they are unknown.
        float32_flops: Of its products in float32 as IEEE has it, 0 if unknown, and then `flops`.
        unlike: What differs in the cluster, as "devices ports links" (ports are of hosts, links inside them); the least
            of all stands here. "" if nothing.
    """

    name: str
    world: int
    local: int
    inside_Bps: float
    inside_s: float
    host_Bps: float
    rank_Bps: float
    between_s: float
    flops: float
    memory_Bps: float
    memory_nbytes: int
    reduces: float
    at_once: float = 0.0
    mesh: int = 0
    reached: Mapping[str, float | str] = dataclasses.field(default_factory=dict, hash=False)
    sharers: int = 0
    routed: Cluster | None = dataclasses.field(default=None, compare=False, repr=False)
    float8_flops: float = 0.0
    float16_flops: float = 0.0
    tf32_flops: float = 0.0
    float32_flops: float = 0.0
    unlike: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # without what is kept besides

    @classmethod
    def of(cls, cluster: Cluster) -> "Network":
        """Look at a cluster: the first host stands for all that are like it, and of others the least counts.

        Ranks work in step, so that a device counts for what the slowest does, and has the memory of the smallest.
        Each cluster is looked at once; it keeps what is found, as it has no hash to find it by.

        Raises:
            ClusterError: if its hosts hold different numbers of ranks, or no path joins two ranks.
        """
        if id(cluster) not in _networks:
            _networks[id(cluster)] = vars(cluster)["_network"] = cls(**wires_of(cluster))
        return _networks[id(cluster)]

    def peak(self, number_format: str) -> tuple[float, str]:
        """Return FLOP/s of products in a format by the data sheet, and the format in which they then run.

        Where there is no TF32 they run in float32, float64 is as fast as float32 (A100, H100, MI300X; V100's is half),
        and a format that the cluster does not tell apart is at `flops`.

        Args:
            number_format: Of `hocket.workload.FORMATS`.
        """
        if number_format == "3xtf32":
            return (self.tf32_flops / 3, number_format) if self.tf32_flops else self.peak("float32")
        if number_format == "tf32" and not self.tf32_flops:
            return self.peak("float32")
        own = {
            "float8": self.float8_flops,
            "float16": self.float16_flops,
            "tf32": self.tf32_flops,
            "float32": self.float32_flops,
            "float64": self.float32_flops,
        }
        return own.get(number_format, 0.0) or self.flops, number_format

    def first(self, workers: int) -> "Network":
        """Return the wires of the first ranks: fewer than a host holds are all of it.

        Where hosts or devices differ, the least of theirs count, but for figures that were changed by hand.
        """
        if workers >= self.world:
            return self
        if workers not in self._firsts:
            found = dataclasses.replace(self, world=workers, local=min(workers, self.local))
            if self.unlike and self.routed is not None:
                own, seen = network_of(self.routed), wires_of(self.routed, workers)
                as_it_was = (
                    name for name in (*_RATES, *FIGURES, "unlike") if getattr(self, name) == getattr(own, name)
                )
                found = dataclasses.replace(found, **{name: seen[name] for name in as_it_was})
            self._firsts[workers] = found
        return self._firsts[workers]

    @functools.cached_property
    def _firsts(self) -> "dict[int, Network]":
        return {}

    @functools.cached_property
    def contention(self) -> Contention | None:
        """What groups do to the links; None for larger worlds, and where nothing says how they are joined.

        A cluster that says what is reached of its links was measured, and what meets on them is in that: of groups that
        lie on all hosts in the same way. `routes` and `messages` look at the links all the same.
        """
        return None if self.reached else self._contention

    @functools.cached_property
    def _contention(self) -> Contention | None:
        if self.routed is None or self.world > (MOST_MEASURED if self.reached else MOST_RANKS):
            return None
        own = network_of(self.routed).first(self.world)
        changed = any(getattr(self, name) != getattr(own, name) for name in _RATES)
        return None if changed else Contention(self.routed, self.world)

    def routes(self, size: int, stride: int) -> Contention | None:
        """Return what groups of such a shape do to the links, where that says what collectives reach."""
        if self.world % (size * stride) or not self._contention:
            return None
        return self._contention if self._contention.uneven(size, stride) else self.contention

    def crowding(self, ranks: int) -> float:
        """How many times longer computation takes while so many ranks compute."""
        return max(1.0, ranks / self.at_once) if self.at_once else 1.0

    def members(self, size: int, stride: int) -> tuple[int, int, int]:
        """Of a group of every `stride`-th rank: members on each host, hosts, and such groups that share a host.

        Some groups of a size that does not divide the host lie across two of them, and all wait for those: six of eight
        ranks a host are pairs on three hosts, since in the worst group no more than two are sure to be together. A host
        has such groups at its first and its last rank only, `stride` of them beside each other.
        """
        local = max(1, math.gcd(size * stride, self.local) // stride) if stride < self.local else 1
        while size % local:
            local -= 1
        across = stride if size * stride >= self.world else 2 * stride
        return local, size // local, max(1, min(self.local // local, across))

    def wires(self, size: int, stride: int, constants: Constants) -> tuple[float, float, int, int]:
        """Bytes per second inside, bytes per second of the whole group between hosts, members on a host, and hosts.

        All groups of the same shape talk at once, and share what leaves a host.
        """
        local, hosts, groups = self.members(size, stride)
        shares = self._shares(hosts, constants)
        inside = self.inside_Bps * shares[0]
        if self.mesh and local > 1:
            inside *= (local - 1) / self.mesh
        return inside, min(self.host_Bps / groups, self.rank_Bps * local) * shares[1], local, hosts

    @staticmethod
    def _shares(hosts: int, constants: Constants) -> tuple[float, float]:
        """Return what a collective reaches of the links inside hosts, and between so many."""
        return constants.inside_share, constants.network_share / (1 + constants.congestion * math.log2(hosts))

    def collective(
        self,
        kind: str,
        nbytes: float,
        size: int,
        stride: int,
        constants: Constants,
        only: tuple[str, tuple[tuple[str, Any], ...]] | None = None,
        beside: tuple[int, tuple[float, ...]] | None = None,
    ) -> Cost:
        """Return the time of a collective over a vector of `nbytes`, by the best closed form.

        Args:
            kind: Of `hocket.schedule.KINDS`.
            nbytes: S, of the vector.
            size: Members of the group.
            stride: How many ranks are from each member to the next.
            constants: Shares of the links that are reached.
            only: The algorithm and its parameters, if they are chosen already.
            beside: Of groups of one stage of a pipeline which, and how much of the time the groups of every stage talk,
                where routes are known. All groups talk at once, if it is not given.
        """
        if size <= 1 or nbytes <= 0:
            return NOTHING
        return self._costs(kind, nbytes, size, stride, constants, only, beside)

    @functools.cached_property
    def _costs(self) -> Callable[..., Cost]:
        return functools.lru_cache(maxsize=16384)(self._cost)  # a search asks for most of them ten times

    def _cost(
        self,
        kind: str,
        nbytes: float,
        size: int,
        stride: int,
        constants: Constants,
        only: tuple[str, tuple[tuple[str, Any], ...]] | None,
        beside: tuple[int, tuple[float, ...]] | None,
    ) -> Cost:
        if beside and not only:  # groups of a shape have one algorithm, the fastest for the slowest of them
            worst = self._costs(kind, nbytes, size, stride, constants, None, None)
            only = worst.algorithm, worst.given
        lines = self._lines(kind, size, stride, constants)
        share = constants.gather_share if kind in ("all_gather", "reduce_scatter") else 1.0
        contention = self.routes(size, stride)
        best, least = lines[0], (0.0, float("inf"))
        uneven = contention is not None and contention.uneven(size, stride)
        if uneven and beside:  # what is simulated, which takes long
            beside = beside[0], tuple(round(4 * part) / 4 for part in beside[1])
        faster = contention.faster_inside if contention else 1.0  # than neighbours', by which all lines are reckoned
        step_by_step = []
        for bound, place in sorted([(one.late_s + one.each * nbytes, one.place) for one in lines]):
            line = lines[place]
            if only not in (None, (line.algorithm.name, line.given)):
                continue
            if bound >= (least[0] + least[1] * nbytes) * faster and not uneven:
                break
            late, each = line.late_s, line.each
            if contention:
                late, each = line.routed(beside)
                each /= share
            late += constants.collective_s
            step_by_step.append((late + each * nbytes, place, late, each))
            if late + each * nbytes < least[0] + least[1] * nbytes:
                best, least = line, (late, each)
        if uneven and step_by_step:
            best, least = fastest_astray(sorted(step_by_step), lines, nbytes, constants.collective_s, beside)
        seconds = least[0] + least[1] * nbytes
        best_cost = Cost(seconds, best.algorithm.name, best.slowest(nbytes), best.given, least[0])
        local, hosts = self.members(size, stride)[:2]
        inside, between = (rate * share for rate in self.wires(size, stride, constants)[:2])
        if constants.in_network and self.reduces and kind == "all_reduce" and hosts > 1:
            near = 2 * (local - 1) / local * nbytes / inside + 2 * (local - 1) * self.inside_s if local > 1 else 0.0
            far = nbytes / (between * self.reduces) + 2 * self.between_s
            link = "between hosts" if far > near else "inside hosts"
            # Reduce-scatter in each host, one tree per member with its share, all-gather in each host.
            name = next(one.name for one in algorithms() if one.in_network and kind in one.kinds)
            best_cost = min(
                best_cost, Cost(near + far + constants.collective_s, name, link), key=lambda one: one.seconds
            )
        return best_cost

    @functools.cached_property
    def _lines(self) -> Callable[[str, int, int, Constants], tuple[CostLine, ...]]:
        return functools.lru_cache(maxsize=4096)(self._lines_of)

    def _lines_of(self, kind: str, size: int, stride: int, constants: Constants) -> tuple[CostLine, ...]:
        """Return what serves a group, on the wires of two hosts."""
        inside, between, local, hosts = self.wires(size, stride, constants)
        share = constants.gather_share if kind in ("all_gather", "reduce_scatter") else 1.0
        inside, between = inside * share, between * share
        found = []
        for place, (one, given, form) in enumerate(forms_of(kind, size, local)):
            wire, wire_in = float(form.wire), float(form.wire_inside)
            if hosts == 1:
                rate_in = rate_out = inside
                late_in = late_out = self.inside_s
            elif wire_in or form.steps_inside:  # two levels: each member has its share of what leaves the host
                rate_in, rate_out, late_in, late_out = inside, between / local, self.inside_s, self.between_s
            else:  # one level: the ring enters and leaves each host by all of its ports; all others cross at once
                rate_out = min(inside if local > 1 else between, between if one.along_hosts else between / local)
                rate_in, late_in, late_out = rate_out, self.between_s, self.between_s
            late = form.steps_inside * late_in, (form.steps - form.steps_inside) * late_out
            each = wire_in / rate_in, (wire - wire_in) / rate_out
            asked = (one, given, Collective(kind, size), stride, self._shares(hosts, constants), form)
            routed = functools.lru_cache(maxsize=64)(functools.partial(self._routed, *asked))
            astray = functools.partial(self._factors, one, given, Collective(kind, size), stride, form)
            found.append(CostLine(place, one, given, hosts, *late, *each, sum(late), sum(each), routed, astray))
        return tuple(found)

    def _factors(self, *asked: Any) -> tuple[float, float, float]:
        assert self._contention is not None
        return self._contention.astray(*asked)

    def _routed(self, *asked: Any) -> tuple[float, float]:
        assert self._contention is not None
        return self._contention.rates(*asked)

    def crosses(self, stride: int, here: int, there: int) -> bool:
        """Return whether of two groups of `stride` ranks in a row the first or the last two are on two hosts."""
        ends = ((here * stride + one, there * stride + one) for one in (0, stride - 1))
        return any(rank // self.local != other // self.local for rank, other in ends)

    def meeting(
        self,
        gather: tuple[float, int, int],
        pair: tuple[int, int],
        ranks: int,
        at: int,
        constants: Constants,
    ) -> LinkMeeting | None:
        """Return what is left of a pipeline's message and of a gather of a stage's parameters that meet on their ways.

        None if the links are unknown.

        Args:
            gather: Bytes of the vector, members of each group, and ranks from each member to the next.
            pair: Ranks of the pipeline of which the first sends to the second.
            ranks: On each of which there are so many.
            at: The rank of the pipeline that gathers.
            constants: Shares of the links that are reached.
        """
        nbytes, size, stride = gather
        contention = self._contention
        if not contention or self.world % ranks:
            return None
        cost = self.collective("all_gather", nbytes, size, stride, constants)
        if cost is NOTHING:
            return LinkMeeting()
        name = next(one for one in algorithms() if one.name == cost.algorithm)
        shares = constants.inside_share, constants.network_share
        return contention.meeting(name, cost.given, Collective("all_gather", size), stride, *pair, ranks, at, shares)

    def links(self, stride: int, pairs: tuple[tuple[int, int], ...], sharers: int, constants: Constants) -> list[Link]:
        """Return what joins the ranks of two groups, each with one, while `sharers` ranks of the host send.

        Args:
            stride: Ranks of a group, one after the other, that send at once.
            pairs: The numbers of both groups. Where routes are known, a link is what the slowest of its ranks reaches
                while all of them send.
            sharers: Ranks of a host that send at once, where routes are not known.
            constants: Shares of the links that are reached.
        """
        if self.contention and all((max(pair) + 1) * stride <= self.world for pair in pairs):
            shares = (constants.inside_share, constants.network_share)
            loads = self.contention.hops(stride, pairs, shares)
            return [Link(1 / load.seconds if load.seconds else float("inf"), load.latency_s) for load in loads]
        near = Link(self.inside_Bps / max(1, self.mesh) * constants.inside_share, self.inside_s)
        rate = min(self.host_Bps / max(1, min(sharers, stride, self.local)), self.rank_Bps) * constants.network_share
        far = Link(rate, self.between_s)
        return [far if self.crosses(stride, *pair) else near for pair in pairs]

    def messages(
        self, stride: int, pairs: tuple[tuple[int, int], ...], together: int, apart: bool, constants: Constants
    ) -> list[StageMessages]:
        """Return what messages between ranks of a pipeline do to links (see `Contention`); [] if that is unknown."""
        if not self._contention or self.world % stride:
            return []
        shares = constants.inside_share, constants.network_share
        return self._contention.messages(stride, pairs, together, apart, shares)


_networks: "weakref.WeakValueDictionary[int, Network]" = weakref.WeakValueDictionary()  # by the identity of the cluster


def network_of(cluster: Cluster | Network) -> Network:
    """Return the wires of a cluster."""
    return cluster if isinstance(cluster, Network) else Network.of(cluster)
