"""Gradients made smaller before they are averaged: one file for each method, behind one interface."""

from ._compressor import Compressor as Compressor
from ._compressor import Job as Job
from ._compressor import Matrix as Matrix
from ._compressor import Memory as Memory
from ._driver import Compression as Compression
from ._link import Link as Link
from ._registry import COMPRESSORS as COMPRESSORS
from ._registry import compressor as compressor
from ._rows import RowCompressor as RowCompressor

__all__ = [
    "COMPRESSORS",
    "Compression",
    "Compressor",
    "Job",
    "Link",
    "Matrix",
    "Memory",
    "RowCompressor",
    "compressor",
]
