"""Optimizers for large batches, LARS and LAMB, right under every plan; and the rules for their learning rates."""

from ._lamb import LAMB as LAMB
from ._lars import LARS as LARS
from ._layerwise import LayerWise as LayerWise
from ._layerwise import Totals as Totals
from ._layerwise import TrustRatios as TrustRatios
from ._rates import polynomial as polynomial
from ._rates import scaled as scaled
from ._rates import warmup as warmup

__all__ = ["LAMB", "LARS", "LayerWise", "Totals", "TrustRatios", "polynomial", "scaled", "warmup"]
