"""Layers taken apart into steps: nothing is lost, and everything stands where it is used."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.workload import Layer, Operation, Workload, WorkloadError, WorkloadStep, parse, refined

_LAYERS = ("a", "b.0", "b.1", "b.10")
_layer = st.builds(
    Layer,
    name=st.just(""),
    kind=st.just("Block"),
    parameters=st.integers(0, 10**9),
    parameter_bytes=st.integers(0, 10**9),
    gradient_bytes=st.integers(0, 10**9),
    optimizer_bytes=st.integers(0, 10**9),
    operations=st.just((Operation("forward", 1e9, 2e6, 3e6, calls=5),)),
    forward_s=st.floats(0, 1),
    backward_s=st.floats(0, 1),
    tensors=st.integers(0, 20),
)
_step = st.builds(
    WorkloadStep,
    name=st.just(""),
    path=st.sampled_from(["", *_LAYERS, "b.1.norm", "b.10.attention.query"]),
    forward_s=st.floats(0, 1),
    backward_s=st.floats(0, 1),
    crossing_bytes=st.integers(0, 10**9),
    parameters=st.integers(0, 10**6),
    tensors=st.integers(0, 3),
    tied_to=st.just(""),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(_layer, min_size=4, max_size=4), st.lists(_step, max_size=12))
def test_nothing_is_lost(layers: list[Layer], more: list[WorkloadStep]) -> None:
    named = tuple(dataclasses.replace(one, name=name) for name, one in zip(_LAYERS, layers, strict=True))
    every = [*more, *(WorkloadStep("", name, 0.1, 0.2, 10, 1, 1) for name in _LAYERS)]
    steps = [one._replace(name=f"step_{number}") for number, one in enumerate(every)]
    workload = refined(Workload("w", 4, named), steps)
    fine = workload.in_steps
    assert fine.layers == workload.finer
    for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(fine, name) == getattr(workload, name)
    assert sum(one.tensors for one in fine.layers) == sum(one.tensors for one in workload.layers)
    for name in ("forward_s", "backward_s"):
        assert getattr(fine, name) == pytest.approx(getattr(workload, name))
    for name in ("flops", "saved_bytes"):  # by time: of a layer whose steps take some
        assert getattr(fine, name) == pytest.approx(getattr(workload, name))
    assert [one.output_bytes for one in fine.layers] == [*(one.crossing_bytes for one in steps[1:]), 0]
    assert parse(str(workload)) == workload


def test_steps_have_the_time_and_the_parameters_of_their_layer() -> None:
    layers = (
        Layer("first", "Block", 30, 120, 120, 240, 8.0, forward_s=1.0, backward_s=2.0, fixed_share=0.5, tensors=2),
        Layer("last", "Linear", 10, 40, 40, 80, forward_s=0.5, backward_s=0.5, tensors=1),
    )
    steps = [
        WorkloadStep("norm", "first.norm", 1.0, 1.0, 0, 10, 1),
        WorkloadStep("linear", "first.linear", 3.0, 1.0, 64, 20, 1),
        WorkloadStep("add", "", 0.0, 0.0, 128),  # in no layer: of the one before
        WorkloadStep("last", "last", 7.0, 7.0, 32, 10, 1),
    ]
    fine = refined(Workload("w", 4, layers), steps).finer
    assert [one.name for one in fine] == ["norm", "linear", "add", "last"]
    assert [one.block for one in fine] == ["first", "first", "first", "last"]
    assert [one.forward_s for one in fine] == [0.25, 0.75, 0.0, 0.5]
    assert [one.backward_s for one in fine] == [1.0, 1.0, 0.0, 0.5]
    assert [one.parameters for one in fine] == [10, 20, 0, 10]
    assert [one.optimizer_bytes for one in fine] == [80, 160, 0, 80]
    assert [one.output_bytes for one in fine] == [64, 128, 32, 0]
    assert [one.fixed_share for one in fine] == [0.5, 0.5, 0.5, 0.0]


def test_blocks_are_numbered_as_they_come() -> None:
    layers = (Layer("a", "x", block="p"), Layer("b", "x", block="p"), Layer("c", "x"), Layer("d", "x", block="q"))
    assert Workload("w", 1, layers).blocks == (0, 0, 1, 2)


def test_times_for_the_whole_are_no_times_of_steps() -> None:
    workload = refined(Workload("w", 4, (Layer("a", "x", forward_s=1.0),)), [WorkloadStep("s", "a", 1.0, 1.0, 0)])
    assert workload.finer
    assert not workload.with_times(2.0, 4.0).finer


def test_two_steps_of_one_name_are_refused() -> None:
    steps = [WorkloadStep("s", "a", 1.0, 1.0, 0), WorkloadStep("s", "a", 1.0, 1.0, 0)]
    with pytest.raises(WorkloadError, match="two layers are called 's'"):
        refined(Workload("w", 4, (Layer("a", "x"),)), steps)
