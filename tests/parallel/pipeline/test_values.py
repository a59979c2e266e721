"""What crosses a cut: descriptions that arrive as they were sent."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from hocket.parallel.pipeline import _values


class Strict(NamedTuple("Strict", [("x", torch.Tensor), ("name", str)])):
    """Takes no tensor of the meta device, as PackedSequence does not."""

    def __new__(cls, x: torch.Tensor, name: str) -> Strict:
        if x.is_meta:
            raise ValueError("not on the meta device")
        return super().__new__(cls, x, name)


def sent(values: object) -> object:
    description = pickle.loads(_values.pickled(_values.described(values)))
    buffers = _values.empty_for(description, torch.device("cpu"))
    with torch.no_grad():
        for buffer, tensor in zip(buffers, _values.tensors_of(values), strict=True):
            buffer.copy_(tensor)
    return _values.filled(description, buffers)


@pytest.mark.parametrize("inside", [False, True])
def test_named_tuples_that_check_their_tensors_arrive(inside: bool) -> None:
    padded = torch.randn(3, 5, 2, dtype=torch.float64)
    packed = pack_padded_sequence(padded, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
    values = {"a": [packed, 7], "b": Strict(torch.ones(2), "n")} if inside else packed
    arrived = sent(values)
    found = arrived["a"][0] if isinstance(arrived, dict) else arrived
    assert type(found) is PackedSequence
    assert torch.equal(pad_packed_sequence(found)[0], pad_packed_sequence(packed)[0])
    if isinstance(arrived, dict):
        assert (arrived["a"][1], type(arrived["b"]), arrived["b"].name) == (7, Strict, "n")
        assert torch.equal(arrived["b"].x, torch.ones(2))


@dataclass
class Output(OrderedDict[str, torch.Tensor]):
    """A mapping whose entries are its fields, as outputs in transformers are: copies get them in the order of these."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.update({name: one for name in ("first", "second") if (one := getattr(self, name)) is not None})

    def __reduce__(self) -> Any:
        return Output, (self.first, self.second)

    def set(self, name: str, tensor: torch.Tensor) -> None:
        self[name] = tensor
        setattr(self, name, tensor)


def test_entries_that_were_set_in_another_order_arrive_under_their_names() -> None:
    values = Output()
    values.set("second", torch.ones(2))
    values.set("first", torch.zeros(2))
    arrived = sent(values)
    assert isinstance(arrived, Output)
    assert (arrived["first"].tolist(), arrived["second"].tolist()) == ([0.0, 0.0], [1.0, 1.0])
