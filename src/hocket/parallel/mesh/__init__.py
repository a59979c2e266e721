"""The ranks that train together, and how they lie in the mesh of a plan."""

from ._links import link_of
from ._mesh import Mesh
from .world import DryGroup, World, join, own_gpu

__all__ = ["DryGroup", "Mesh", "World", "join", "link_of", "own_gpu"]
