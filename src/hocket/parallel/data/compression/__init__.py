"""Gradients made smaller before they are averaged: one file for each method, behind one interface."""

from ._compressor import BucketJob as BucketJob
from ._compressor import BucketMemory as BucketMemory
from ._compressor import Compressor as Compressor
from ._compressor import CountingGroup as CountingGroup
from ._compressor import Matrix as Matrix
from ._driver import COMPRESSORS as COMPRESSORS
from ._driver import Compression as Compression
from ._driver import compressor as compressor
from ._rows import RowCompressor as RowCompressor

__all__ = [
    "COMPRESSORS",
    "BucketJob",
    "BucketMemory",
    "Compression",
    "Compressor",
    "CountingGroup",
    "Matrix",
    "RowCompressor",
    "compressor",
]
