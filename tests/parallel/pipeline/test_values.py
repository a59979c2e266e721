"""What crosses a cut: descriptions that arrive as they were sent."""

from __future__ import annotations

import pickle
from typing import NamedTuple

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
