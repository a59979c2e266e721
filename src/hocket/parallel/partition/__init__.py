"""Tensors divided among ranks: layers (tensor parallelism) and samples (spatial parallelism)."""
