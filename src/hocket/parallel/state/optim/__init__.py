"""Optimizers for large batches, LARS and LAMB, right under every plan; and the rules for their learning rates."""

from ._lamb import LAMB
from ._lars import LARS
from ._layerwise import LayerWise, Totals, TrustRatios
from ._rates import polynomial, scaled, warmup

__all__ = ["LAMB", "LARS", "LayerWise", "Totals", "TrustRatios", "polynomial", "scaled", "warmup"]
