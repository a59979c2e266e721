import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import comm
from hocket.comm.shm._memory import (
    ALIGNMENT,
    SharedMemory,
    shared_memory,
)


def test_a_registered_tensor_has_the_asked_shape_and_type_and_lies_in_an_arena():
    tensor = comm.empty(3, 5, dtype=torch.float64)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.float64
    assert comm.is_registered(tensor)
    assert comm.is_registered(tensor[1:])
    assert not comm.is_registered(tensor.T)
    assert not comm.is_registered(torch.empty(3))


def test_the_shape_may_be_a_sequence_and_the_default_type_is_torchs():
    assert comm.zeros([2, 3]).shape == (2, 3)
    assert comm.zeros(2).dtype == torch.get_default_dtype()
    assert comm.zeros(4, dtype=torch.int8).sum() == 0
    assert comm.empty_like(torch.empty(2, 7, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_an_empty_tensor_needs_no_memory():
    assert comm.empty(0, 3).shape == (0, 3)


def test_freed_memory_is_used_again():
    first = comm.empty(1000)
    address = first.data_ptr()
    view = first[10:]
    del first
    gc.collect()
    assert comm.empty(1000).data_ptr() != address, "a view still holds the memory"
    del view
    gc.collect()
    assert comm.empty(1000).data_ptr() == address


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 5000), st.integers(-5, -1)), min_size=1, max_size=60))
def test_live_allocations_never_overlap_and_all_memory_comes_back(steps):
    memory = SharedMemory()
    memory.allocate(1)
    _take_and_give(memory, steps)
    gc.collect()
    (arena,) = memory._arenas
    assert arena.free == [(0, arena.segment.nbytes)]


def _take_and_give(memory, steps):
    live = []
    for step in steps:
        if step > 0:
            view = memory.allocate(step)
            start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
            assert start % ALIGNMENT == 0
            place = memory.find(start, step)
            assert place is not None
            for other_start, other in live:
                assert start + step <= other_start or other_start + len(other) <= start
            live.append((start, view))
        elif live:
            live.pop(step % len(live))


def test_find_rejects_what_leaves_the_arena():
    tensor = comm.empty(16)
    place = shared_memory.find(tensor.data_ptr(), 64)
    assert place is not None
    assert shared_memory.find(tensor.data_ptr(), place.arena_nbytes + 1) is None
    assert shared_memory.find(1, 1) is None


def test_a_forked_child_does_not_touch_its_parents_arenas():
    import os

    tensor = comm.zeros(8)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = comm.empty(8)
        os.write(writer, b"1" if own.data_ptr() != tensor.data_ptr() and comm.is_registered(own) else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"1"


def test_more_than_one_arena_can_be_found():
    big = comm.empty(70 * 2**20, dtype=torch.uint8)
    small = comm.empty(8)
    assert comm.is_registered(big)
    assert comm.is_registered(small)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.float16, torch.uint8])
def test_every_element_type_can_be_allocated(dtype):
    assert comm.zeros(5, dtype=dtype).dtype == dtype
