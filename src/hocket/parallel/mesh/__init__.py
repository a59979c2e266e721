"""The ranks that train together, and how they lie in the mesh of a plan."""

from ._failed_group import give_up
from ._links import link_of
from ._mesh import Mesh
from ._programs import warn_of_other_programs
from ._turns import in_turn
from .world import DryGroup, World, join, own_gpu

__all__ = [
    "DryGroup", "Mesh", "World", "give_up", "in_turn", "join", "link_of", "own_gpu", "warn_of_other_programs",
]  # fmt: skip
