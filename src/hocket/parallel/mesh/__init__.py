"""The ranks that train together, and how they lie in the mesh of a plan."""

from ._links import link_of as link_of
from ._mesh import Mesh as Mesh
from .world import DryGroup as DryGroup
from .world import World as World
from .world import join as join

__all__ = ["DryGroup", "Mesh", "World", "join", "link_of"]
