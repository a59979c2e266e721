"""Gradients made smaller before they are averaged: one file for each method, behind one interface."""

from ._compressor import BucketJob, BucketMemory, Compressor, CountingGroup, Matrix
from ._driver import COMPRESSORS, Compression, compressor
from ._rows import RowCompressor

__all__ = [
    "COMPRESSORS", "BucketJob", "BucketMemory", "Compression", "Compressor", "CountingGroup", "Matrix", "RowCompressor",
    "compressor",
]  # fmt: skip
