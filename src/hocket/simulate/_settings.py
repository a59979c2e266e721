"""What a simulation counts besides latency and bandwidth: everything here is off unless asked for."""

from dataclasses import dataclass

from ._tasks import SimulationError


@dataclass(frozen=True)
class Protocol:
    """How messages up to a size are sent.

    Attributes:
        up_to_nbytes: The largest message that is sent so.
        latency_s: What it adds to every message.
        bandwidth: The part of the bandwidth that it reaches, as 0.5 of a protocol that sends a flag with every word.
    """

    up_to_nbytes: float
    latency_s: float = 0.0
    bandwidth: float = 1.0


@dataclass(frozen=True)
class Settings:
    """The options of a simulation; the plain model has none of them.

    Attributes:
        overhead_s: Added to every message, for the processor that posts it.
        protocols: By size, the smallest first; a message takes the first that it fits, and none if it fits none.
        congestion: For every flow on a link beyond the first the part of its capacity that is lost, for incast, pauses
            and losses that max-min fairness does not know. A linear model of ours, not from a paper: fit it to
            measurements of the network that is meant.
        reduce_s_per_byte: gamma, what a rank needs to reduce what has arrived; one message after the other.
        pieces: In how many every message is cut; a piece is sent on while the next one comes, and those between the
            same ends follow each other. `hocket.comm` cuts long messages so where it pays.
        lockstep: All transfers of a step wait for all of the step before, as if there were a barrier.
        latency_factor: What the latency of every path is multiplied by.
        bandwidth_factor: What the capacity of every link is multiplied by.
        cross_traffic: What of a flow's rate its acknowledgements take on the way back.
        half_duplex: Both directions of a cable share its capacity.
        weigh_by_latency: At a shared link, flows get shares in inverse proportion to the latency of their paths plus
            `weight_nbytes` divided by the bandwidth of every link on them, as TCP does by round-trip times.
        weight_nbytes: See there.
        window_nbytes: A flow's rate is at most this divided by twice its latency; 0 for no window.
    """

    overhead_s: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    congestion: float = 0.0
    reduce_s_per_byte: float = 0.0
    pieces: int = 1
    lockstep: bool = False
    latency_factor: float = 1.0
    bandwidth_factor: float = 1.0
    cross_traffic: float = 0.0
    half_duplex: bool = False
    weigh_by_latency: bool = False
    weight_nbytes: float = 0.0
    window_nbytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_factor", "bandwidth_factor"):
            if getattr(self, name) <= 0:
                raise SimulationError(f"settings.{name}: {getattr(self, name)} must be more than 0")
        for name in (
            "overhead_s",
            "congestion",
            "reduce_s_per_byte",
            "cross_traffic",
            "weight_nbytes",
            "window_nbytes",
        ):
            if getattr(self, name) < 0:
                raise SimulationError(f"settings.{name}: {getattr(self, name)} must be 0 or more")
        if self.pieces < 1:
            raise SimulationError(f"settings.pieces: {self.pieces} must be 1 or more")
        sizes = [protocol.up_to_nbytes for protocol in self.protocols]
        if sizes != sorted(sizes):
            raise SimulationError("settings.protocols: give them by size, the smallest first")

    @classmethod
    def lv08(cls) -> "Settings":
        """SimGrid's LV08, for Internet-like TCP: latency x13.01, bandwidth x0.97, acknowledgements 5%, RTT weights.

        The numbers are those of SimGrid's documentation (models, LV08), after Velho and Legrand (SIMUTools 2009);
        there a cable is one medium for both directions unless a platform says otherwise, as here.
        """
        return cls(
            latency_factor=13.01,
            bandwidth_factor=0.97,
            cross_traffic=0.05,
            half_duplex=True,
            weigh_by_latency=True,
            weight_nbytes=20537.0,
            window_nbytes=4194304.0,
        )
