"""Which rank gets which rows: no process is needed to see that."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hocket.parallel.embedding import distribute_embeddings
from hocket.parallel.embedding._sharding import How, Table, decide
from hocket.parallel.mesh.world import World

TABLES = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 32)), min_size=1, max_size=12).map(
    lambda shapes: [Table(f"t{i}", rows, rows * width * 4, i % 5 == 4) for i, (rows, width) in enumerate(shapes)]
)


@settings(deadline=None, max_examples=60)
@given(tables=TABLES, world=st.integers(1, 9), how=st.sampled_from(["table", "row", "hybrid"]))
def test_every_row_is_with_one_rank_and_no_rank_has_much_more_than_others(
    tables: list[Table], world: int, how: How
) -> None:
    decisions = decide(tables, world, how, replicate_below=1000)
    assert [d.name for d in decisions] == [t.name for t in tables]
    load = [0.0] * world
    for table, decision in zip(tables, decisions, strict=True):
        if decision.form == "replicated":
            assert how == "hybrid"
            assert table.nbytes < 1000
            assert not table.sparse
            continue
        ranges = [decision.range(rank) for rank in range(world)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == table.rows
        assert all(end == begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))
        sizes = [end - begin for begin, end in ranges]
        assert max(sizes) == table.rows if decision.form == "table" else max(sizes) - min(sizes) <= 1
        for rank, rows in enumerate(sizes):
            load[rank] += rows * table.nbytes / table.rows
    divided = [t for t, d in zip(tables, decisions, strict=True) if d.form != "replicated"]
    fair = sum(t.nbytes for t in divided) / world
    largest_part = max((t.nbytes for t, d in zip(tables, decisions, strict=True) if d.form == "table"), default=0)
    a_row_each = sum(t.nbytes / t.rows for t, d in zip(tables, decisions, strict=True) if d.form == "row")
    assert max(load) <= fair + largest_part + a_row_each + 1e-6


def test_whole_tables_are_balanced_by_bytes() -> None:
    tables = [Table(name, nbytes, nbytes) for name, nbytes in (("a", 100), ("b", 60), ("c", 50), ("d", 10))]
    owners = {d.name: d.bounds.count(0) - 1 for d in decide(tables, 2, "table")}
    assert owners == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_hybrid_decides_by_size_and_says_why() -> None:
    tables = [Table("small", 10, 400), Table("large", 9000, 360_000), Table("medium", 700, 28_000)]
    tables.append(Table("sparse", 10, 400, sparse=True))
    found = {d.name: str(d) for d in decide(tables, 2, "hybrid")}
    assert found == {
        "small": "small: replicated, 400 bytes, less than 16384 bytes",
        "large": "large: row, 360000 bytes are more than a rank's share of 194200",
        "medium": "medium: table, all of it on rank 0",
        "sparse": "sparse: table, all of it on rank 1",
    }


def test_one_rank_alone_keeps_its_tables() -> None:
    model = nn.Embedding(4, 2)
    form = distribute_embeddings(model, World(0, 1, None), "row")
    assert not form.shards
    assert type(model) is nn.Embedding
    assert model(torch.tensor([3])).shape == (1, 2)


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="divided by 'table', 'row', 'hybrid', not 'column'"):
        distribute_embeddings(nn.Embedding(4, 2), World(0, 2, None), "column")  # type: ignore[arg-type]
