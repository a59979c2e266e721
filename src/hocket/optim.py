"""Optimizers for large batches, LARS and LAMB, right under every plan; and the rules for their learning rates."""

from hocket.parallel.state.optim import LAMB, LARS, LayerWise, Totals, TrustRatios, polynomial, scaled, warmup

__all__ = ["LAMB", "LARS", "LayerWise", "Totals", "TrustRatios", "polynomial", "scaled", "warmup"]
