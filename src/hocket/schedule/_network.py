"""What a schedule needs to know of the cluster it runs on; `hocket.cluster.Cluster` fits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Routes(Protocol):
    """The directed links that each of several flows crosses, in order: `links[offsets[i]:offsets[i + 1]]`."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """One more than there are flows."""

    @property
    def links(self) -> NDArray[np.int64]:
        """Numbers of links."""


class Network(Protocol):
    """Nodes joined by directed links, and the paths that flows take."""

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The node of each rank."""

    @property
    def capacity_Bps(self) -> NDArray[np.float64]:
        """Bytes per second of each link."""

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Seconds of each link."""

    @property
    def link_names(self) -> Sequence[str]:
        """Of each link, for people."""

    def node(self, name: str) -> int:
        """The node of that name; raises KeyError."""

    def routes(self, source: NDArray[np.int64], destination: NDArray[np.int64]) -> Routes:
        """The links of one flow for each pair of nodes."""
