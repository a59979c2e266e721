"""The verifier says of every order what a player that carries it out says."""

from __future__ import annotations

import random

import pytest

from hocket.schedule.pipeline import NAMED_ORDERS, PipelineAction, PipelineOrder, grid, pipeline_order, verify

from .player import Player

SHAPES = [(1, 1, 2), (1, 3, 2), (2, 1, 1), (2, 1, 4), (2, 2, 2), (3, 1, 3), (3, 1, 4), (2, 3, 4), (4, 1, 4), (3, 2, 3)]
KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")


def orders() -> list[PipelineOrder]:
    """Every named order in some shapes, with its messages implied and written."""
    found = []
    for name, one in NAMED_ORDERS.items():
        for shape in SHAPES:
            if one.admits(*shape):
                order = pipeline_order(name, *shape)
                found += [order, order.with_messages()]
    return found


@pytest.mark.parametrize("order", orders(), ids=lambda o: f"{o.name}-{o.world}-{o.stages}-{o.micro_batches}")
def test_a_named_order_has_no_findings(order: PipelineOrder) -> None:
    assert verify(order) == ()
    assert Player(order).ends_well()


def mutated(order: PipelineOrder, draw: random.Random) -> PipelineOrder:
    """The same with one to three changes."""
    rows = [list(rank) for rank in order.ranks]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change(rows, order, draw)
    return PipelineOrder(order.name, order.stages, order.micro_batches, tuple(map(tuple, rows)))


def change(rows: list[list[PipelineAction]], order: PipelineOrder, draw: random.Random) -> None:
    row = draw.choice([row for row in rows if row])
    at = draw.randrange(len(row))
    how = draw.choice(("next", "next", "next", "swap", "move", "drop", "double", "halve", "halve", "away", "other"))
    if how == "next" and at + 1 < len(row):
        row[at], row[at + 1] = row[at + 1], row[at]
    elif how == "swap":
        other = draw.randrange(len(row))
        row[at], row[other] = row[other], row[at]
    elif how == "move":
        row.insert(draw.randrange(len(row)), row.pop(at))
    elif how == "drop":
        row.pop(at)
    elif how == "double":
        row.insert(draw.randrange(len(row) + 1), row[at])
    elif how == "halve":
        backwards = [index for index, action in enumerate(row) if action.kind == "B"]
        if backwards:
            at = draw.choice(backwards)
            whole = row[at]
            row[at] = whole._replace(kind="I")
            row.insert(draw.randrange(at, len(row)) + draw.choice((0, 1, 1, 1)), whole._replace(kind="W"))
    elif how == "away":
        draw.choice(rows).append(row.pop(at))
    elif how == "other":
        field = draw.choice(("stage", "kind", "micro_batch"))
        value = {
            "stage": draw.randrange(order.stages),
            "kind": draw.choice(KINDS),
            "micro_batch": draw.randrange(order.micro_batches),
        }[field]
        row[at] = row[at]._replace(**{field: value})


def test_the_verifier_judges_mutated_orders_as_a_player_does() -> None:
    draw = random.Random(16)
    known = orders()
    verdicts = {True: 0, False: 0}
    kinds: set[str] = set()
    for number in range(2000):
        order = mutated(draw.choice(known), draw)
        found = verify(order)
        well = {Player(order, seed=number + turn).ends_well() for turn in range(2)}
        assert well == {not found}, f"{order}\n{[str(one) for one in found]}"
        verdicts[not found] += 1
        kinds |= {one.kind for one in found}
    assert min(verdicts.values()) > 200, verdicts
    assert kinds == {"misplaced", "missing", "duplicate", "order", "message", "deadlock"}


def test_a_finding_names_the_rank_and_the_action() -> None:
    text = str(pipeline_order("1f1b", 2, 1, 2))
    found = verify(PipelineOrder.parse(text.replace("0F0", "0B0", 1).replace("0B0 0B1", "0F0 0B1")))
    assert [(one.kind, one.rank, one.action) for one in found] == [("order", 0, 0)]
    assert str(found[0]) == "rank 0, action 0: 0B0 needs 0F0, which comes later"


def test_a_circle_names_what_each_rank_waits_for() -> None:
    text = str(pipeline_order("1f1b", 2, 1, 2))
    found = verify(
        PipelineOrder.parse(text.replace("0F1 0B0", "0B0 0F1").replace("1F0 1B0 1F1 1B1", "1F1 1F0 1B0 1B1"))
    )
    assert [str(one) for one in found] == [
        "rank 0, action 1: 0B0 waits for 1B0 of rank 1, which waits, too",
        "rank 1, action 0: 1F1 waits for 0F1 of rank 0, which waits, too",
    ]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    order = PipelineOrder.parse(
        "order circle ranks=2 stages=2 micro_batches=2\nrank 0\n0F0 0B0 0F1 0B1\nrank 1\n1F1 1B1 1F0 1B0"
    )
    assert {one.kind for one in verify(order)} == {"deadlock"}


def test_messages_that_cross_are_found() -> None:
    text = (
        str(pipeline_order("gpipe", 2, 1, 2).with_messages()).replace("1RECV_F0", "X").replace("1RECV_F1", "1RECV_F0")
    )
    found = verify(PipelineOrder.parse(text.replace("X", "1RECV_F1")))
    assert any("takes what is meant for 1RECV_F0: rank 0 sends that first" in str(one) for one in found)


def test_memory_in_flight_is_bounded_where_asked() -> None:
    order = pipeline_order("gpipe", 4, 1, 8)
    assert verify(order, in_flight=8) == ()
    assert [one.kind for one in verify(order, in_flight=4)] == ["memory"] * 4
    assert verify(pipeline_order("1f1b", 4, 1, 8), in_flight=4) == ()


def test_no_more_findings_than_asked_for() -> None:
    empty = PipelineOrder("empty", 4, 64, ((),) * 4)
    assert len(verify(empty, limit=7)) == 7


def test_an_order_in_which_nothing_can_happen_has_a_grid():
    order = PipelineOrder.parse("order none ranks=1 stages=1 micro_batches=1\nrank 0\n  0B0 0F0\n")
    assert grid(order, verify(order)) == "time\nrank 0\n"
