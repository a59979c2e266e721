"""Workloads: what one training step of a model asks for. Values and analytic models; no torch is imported here."""

from ._text import parse as parse
from ._text import to_text as to_text
from ._transformer import SHAPES as SHAPES
from ._transformer import named_transformer as named_transformer
from ._transformer import transformer as transformer
from ._workload import PARTS as PARTS
from ._workload import Layer as Layer
from ._workload import Operation as Operation
from ._workload import Workload as Workload
from ._workload import WorkloadError as WorkloadError

__all__ = [
    "PARTS",
    "SHAPES",
    "Layer",
    "Operation",
    "Workload",
    "WorkloadError",
    "named_transformer",
    "parse",
    "to_text",
    "transformer",
]
