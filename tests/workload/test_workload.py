"""The value, its text, and the analytic transformers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket._ends import with_end
from hocket.workload import (
    PARTS,
    SHAPES,
    Exchange,
    Layer,
    Operation,
    Share,
    Workload,
    WorkloadError,
    llama,
    named_transformer,
    parse,
    transformer,
)

_names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=12).filter(
    str.strip
)
_sizes = st.floats(0, 1e18, allow_nan=False)
_operations = st.builds(Operation, _names, _sizes, _sizes, _sizes, st.sampled_from(PARTS), st.integers(0, 9))
_exchanges = st.builds(
    Exchange,
    st.sampled_from(["forward", "backward"]),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
    _sizes,
    st.integers(1, 9),
    st.booleans(),
)
_shares = st.builds(
    Share,
    degree=st.integers(2, 64),
    parameter_bytes=_sizes,
    operations=st.lists(_operations, max_size=2).map(tuple),
    exchanges=st.lists(_exchanges, max_size=2).map(tuple),
)
_layers = st.builds(
    Layer,
    name=_names,
    kind=_names,
    parameters=st.integers(0, 10**12),
    parameter_bytes=st.integers(0, 10**12),
    output_bytes=_sizes,
    operations=st.lists(_operations, max_size=3).map(tuple),
    forward_s=st.floats(0, 10),
    fixed_share=st.floats(0, 1),
    tensor_limit=st.integers(1, 128),
    shares=st.lists(_shares, max_size=2).map(tuple),
)


@settings(max_examples=80, deadline=None)
@given(
    _names,
    st.integers(1, 512),
    st.lists(_layers, min_size=1, max_size=5, unique_by=lambda one: one.name),
    st.floats(0, 1),
)
def test_text_says_all_of_a_workload(name: str, batch: int, layers: list[Layer], optimizer_s: float) -> None:
    workload = Workload(name, batch, tuple(layers), "float32", "by hand", "image", optimizer_s)
    assert parse(str(workload)) == workload


def test_text_writes_layers_that_are_alike_once() -> None:
    text = str(named_transformer("gpt-175b"))
    assert text.count("\n") < 150
    assert "layer block95 like block0" in text


def test_a_change_of_one_layer_changes_few_lines() -> None:
    one = named_transformer("gpt-7b")
    layers = list(one.layers)
    layers[3] = dataclasses.replace(layers[3], forward_s=0.5)
    before, after = (set(str(each).splitlines()) for each in (one, dataclasses.replace(one, layers=tuple(layers))))
    assert {line.split()[1] for line in after - before if line.startswith("layer")} == {"block2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workload a\nbatch 1\n  op flops=1", "line 3.*before the first layer"),
        ("workload a\nbatch 1\nlayer b flups=1", "line 3.*no field of a layer"),
        ("workload a\nbatch 1\nlayer b like c", "line 3.*no layer 'c'"),
        ("workload a\nbach 1", "line 2.*no line begins with 'bach'"),
        ("workload a\nlayer b kind=c", "no line 'batch'"),
        ("workload a\nbatch many", "write numbers"),
        ("workload a\nbatch 1", "no line 'layer'"),
        ("workload a\nbatch 1\nlayer b kind=c forward_s=nan", "line 3.*'forward_s=nan' is no such number"),
        ("workload a\nbatch 1\nlayer b kind=c parameter_bytes=-1", "line 3.*'parameter_bytes=-1' is no such number"),
        ("workload a\nbatch 1\nlayer b kind=c fixed_share=7", "line 3.*'fixed_share=7' is no such number"),
        ("workload a\nbatch 1\nlayer b kind=c\n  op flops=inf", "line 4.*'flops=inf' is no such number"),
        ("workload a\nbatch 1\nlayer b kind=c\n  op part=other", "line 4.*not one of shared"),
    ],
)
def test_errors_name_the_line(text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        parse(text)


def test_a_text_that_was_cut_off_is_refused_wherever_it_was() -> None:
    text = with_end(str(transformer(16, 2, 2, vocabulary=64, sequence=8)))
    assert parse(text) == transformer(16, 2, 2, vocabulary=64, sequence=8)
    for length in range(1, len(text) - 1):  # the last byte is a line's end
        with pytest.raises(WorkloadError, match="cut off"):
            parse(text[:length])


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(WorkloadError, match="two layers are called 'a'"):
        Workload("w", 1, (Layer("a", "x"), Layer("a", "y")))


# Narayanan et al., SC'21: P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), table 1's sizes in billions.
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "22b"])
def test_transformers_have_the_published_parameters(name: str) -> None:
    hidden, layers, _ = SHAPES[name]
    formula = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + 2048) / (12 * layers * hidden))
    found = named_transformer(name).parameters
    assert found == pytest.approx(formula, rel=1e-4)
    assert found / 1e9 == pytest.approx(float(name.rstrip("b")), rel=0.05)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["1.7b", "22b", "175b"])
def test_transformers_have_the_published_flops_and_activations(name: str, batch: int) -> None:
    (hidden, layers, heads), sequence, vocabulary = SHAPES[name], 2048, 51200
    workload = named_transformer(name, batch=batch)
    # F = 96 B s l h^2 (1 + s/(6 h) + V/(16 l h)) with full recomputation of the layers: 4/3 of three forward passes of
    # them, and three of the logits, whose term is 6 B s h V.
    blocks = sum(one.flops for one in workload.layers if one.kind == "transformer")
    narayanan = 96 * batch * sequence * layers * hidden**2
    narayanan *= 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert 4 * blocks + 3 * (workload.flops - blocks) == pytest.approx(narayanan, rel=1e-12)
    # Korthikanti et al., equation 1: s b h (34 + 5 a s / h) bytes a layer.
    wide = sequence * batch * hidden
    block = next(one for one in workload.layers if one.kind == "transformer")
    assert block.saved_bytes == pytest.approx(wide * (34 + 5 * heads * sequence / hidden), rel=1e-12)


def test_a_transformer_that_cannot_be_is_refused() -> None:
    with pytest.raises(WorkloadError, match="7 heads do not divide a hidden size of 64"):
        transformer(64, 2, 7)
    with pytest.raises(WorkloadError, match="there is no transformer 'gpt-9b'; there are gpt-1.7b"):
        named_transformer("gpt-9b")


def test_times_are_dealt_by_flops() -> None:
    timed = named_transformer("gpt-1.7b").with_times(1.0, 2.0)
    assert (timed.forward_s, timed.backward_s) == (pytest.approx(1.0), pytest.approx(2.0))
    assert timed.layers[0].forward_s == 0.0
    assert timed.measured


def test_experts_are_all_held_and_only_the_active_ones_compute() -> None:
    # Total and active parameters as the authors give them: 46.7B and 12.9B, 140.6B and 39.1B.
    for name, billions, computing in (("8x7b", 46.70, 12.9), ("8x22b", 140.63, 39.1)):
        one = named_transformer(f"mixtral-{name}")
        assert one.parameters / 1e9 == pytest.approx(billions, abs=0.01)
        products = sum(op.flops for layer in one.layers for op in layer.operations if op.name != "attention")
        embedding = one.layers[0].parameters  # is looked up, not multiplied
        assert products / 2 / 4096 + embedding == pytest.approx(computing * 1e9, rel=0.01)
    sizes = (1024, 2, 16, 8, 3584)
    plain, sparse = llama(*sizes), llama(*sizes, experts=4, active=1)
    extra = sum(op.flops for layer in sparse.layers for op in layer.operations if op.name == "router")
    assert sparse.flops - extra == pytest.approx(plain.flops)
    assert sparse.layers[1].share(8).parameter_bytes < sparse.layers[1].parameter_bytes / 7.9
    with pytest.raises(WorkloadError, match="cannot take 3 of 2 experts"):
        llama(*sizes, experts=2, active=3)


def test_a_llama_has_its_authors_parameters_and_keeps_no_scores() -> None:
    for name, billions in (("8b", 8.03), ("70b", 70.55), ("405b", 405.85)):
        assert named_transformer(f"llama-3-{name}").parameters / 1e9 == pytest.approx(billions, abs=0.01)
    one = named_transformer("llama-3-8b")
    per_token = one.flops / 8192 / 2
    assert per_token == pytest.approx(one.parameters - 128256 * 4096 + 32 * 2 * 8192 * 4096, rel=1e-3)
    assert one.saved_bytes < 60 * 2**30  # scores of 8,192 tokens would be 128 GiB more
    with pytest.raises(WorkloadError, match="choose divisors"):
        llama(4096, 2, 32, 5, 1000)
