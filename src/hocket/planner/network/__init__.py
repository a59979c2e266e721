"""A cluster as closed forms see it: wires, what groups do to them, and constants of what is reached."""

from ._balance import CUT_SLACK, LOCAL, Link, balance
from ._constants import USUAL, Constants, slowest_of, waiting
from ._contention import MOST_RANKS, LinkMeeting, LinkSeconds, StageMessages
from ._cost_lines import NOTHING, Cost
from ._network import Network, network_of

__all__ = [
    "CUT_SLACK", "LOCAL", "MOST_RANKS", "NOTHING", "USUAL", "Constants", "Cost", "Link", "LinkSeconds", "LinkMeeting",
    "Network", "StageMessages", "balance", "network_of", "slowest_of", "waiting",
]  # fmt: skip
