"""The model's state on many ranks: who owns which part, broadcast, clipped, saved, and loaded under any plan."""

from ._broadcast import Parcels as Parcels
from ._broadcast import align_optimizer as align_optimizer
from ._broadcast import check_model as check_model
from ._broadcast import send_once as send_once
from ._clip import clip as clip
from ._excluded import is_apart as is_apart
from ._excluded import keepers as keepers
from ._excluded import set_apart as set_apart
from ._norms import WholeNorms as WholeNorms
from ._owned import Owned as Owned
from ._owned import check_elementwise as check_elementwise
from ._owned import hand_over as hand_over
from ._pieces import Box as Box
from ._pieces import Piece as Piece
from ._pieces import Place as Place
from ._pieces import Range as Range
from ._pieces import Segment as Segment
from ._pieces import memory_order as memory_order
from .checkpoint import CheckpointError as CheckpointError
from .memory import StateBytes as StateBytes

__all__ = [
    "Box",
    "CheckpointError",
    "Owned",
    "Parcels",
    "Piece",
    "Place",
    "Range",
    "Segment",
    "StateBytes",
    "WholeNorms",
    "align_optimizer",
    "check_elementwise",
    "check_model",
    "clip",
    "hand_over",
    "is_apart",
    "keepers",
    "memory_order",
    "send_once",
    "set_apart",
]
