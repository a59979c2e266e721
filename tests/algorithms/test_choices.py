from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.algorithms import Choice, Choices, algorithms, from_toml, get, to_toml
from hocket.schedule import KINDS, Collective, ScheduleError, Wire, verify

WIRE = Wire(20e-6, 1e-9, 2e-10, message_s=8e-6)
INSIDE = Wire(1e-6, 1e-10, 2e-10, message_s=1e-6)


def test_small_messages_take_fewer_steps_and_large_ones_fewer_bytes() -> None:
    choices = Choices.by_closed_form(WIRE, 16, kinds=["all_reduce"])
    assert choices.pick("all_reduce", 16, 64).algorithm == "recursive_doubling"
    assert choices.pick("all_reduce", 16, 1 << 30).algorithm == "halving_doubling"
    assert Choices.by_closed_form(WIRE, 16).pick("broadcast", 16, 64).algorithm == "binomial"
    assert str(Choices.by_closed_form(WIRE, 16).pick("broadcast", 16, 1 << 30)).startswith("chain pieces=")


@pytest.mark.parametrize(("world", "local"), [(8, 1), (12, 1), (13, 1), (16, 4), (12, 3), (2, 2)])
def test_the_pick_is_the_fastest_at_every_size_of_the_grid(world: int, local: int) -> None:
    sizes = [1 << k for k in range(6, 33)]
    choices = Choices.by_closed_form(WIRE, world, local=local, inside=INSIDE)
    for kind in KINDS:
        collective = Collective(kind, world)
        tried = [
            (one, {**variant, **level})
            for one in algorithms()
            for variant in one.variants
            for level in [{}, {"local": local}][: 1 + ("local" in one.parameters)]
            if not one.in_network
        ]
        able = [(one, parameters) for one, parameters in tried if one.serves(collective, **parameters) is None]
        for size in sizes if kind != "barrier" else sizes[:1]:
            row = choices.pick(kind, world, size, local=local)
            best = min(one.cost(collective, size, WIRE, inside=INSIDE, **parameters) for one, parameters in able)
            time = get(row.algorithm).cost(collective, size, WIRE, inside=INSIDE, **row.parameters)
            assert time == pytest.approx(best, rel=1e-12), (kind, size)


def test_rows_of_one_kind_meet_and_cover_all_sizes() -> None:
    choices = Choices.by_closed_form(WIRE, 12)
    for kind in KINDS:
        rows = [row for row in choices.rows if row.kind == kind]
        assert rows[0].start == 0
        assert rows[-1].stop is None
        assert [row.stop for row in rows[:-1]] == [row.start for row in rows[1:]]
        assert all(str(a) != str(b) for a, b in zip(rows, rows[1:], strict=False))
        assert all(row.seconds is not None and row.margin is not None and row.margin >= 0 for row in rows)


def test_two_levels_win_where_hosts_are_near() -> None:
    choices = Choices.by_closed_form(WIRE, 32, local=8, inside=INSIDE, kinds=["all_reduce"])
    assert choices.pick("all_reduce", 32, 1 << 26, local=8).algorithm == "rails"
    assert str(choices.pick("all_reduce", 32, 1 << 26, local=8)) == "rails local=8"


def test_switches_reduce_only_if_they_can() -> None:
    assert not any(row.algorithm == "aggregation_tree" for row in Choices.by_closed_form(WIRE, 16).rows)
    able = Choices.by_closed_form(WIRE, 16, in_network=True)
    assert able.pick("all_reduce", 16, 1 << 20).algorithm == "aggregation_tree"
    hosts = Choices.by_closed_form(WIRE, 64, local=8, inside=INSIDE, in_network=True)
    assert any(str(row) == "aggregation_tree local=8" for row in hosts.rows)


def test_what_is_picked_builds_and_verifies() -> None:
    choices = Choices.by_closed_form(WIRE, 12, local=3, inside=INSIDE)
    for row in choices.rows:
        assert verify(row.build(Collective(row.kind, 12))) == ()


def test_measured_times_make_rows_with_runner_up_and_margin() -> None:
    times = {
        "ring": {4096: 9.0, 65536: 8.0, 1 << 20: 10.0},
        "double_tree pieces=4": {4096: 3.0, 65536: 7.0, 1 << 20: 11.0},
        "double_tree pieces=16": {4096: 4.0, 65536: 7.5, 1 << 20: 12.0},
    }
    small, large = Choices.by_times("all_reduce", 8, times).rows
    assert (str(small), small.start, small.stop, small.nbytes) == ("double_tree pieces=4", 0, 1 << 20, 4096)
    assert (small.seconds, small.runner_up, small.margin, small.origin) == (3.0, "ring", 2.0, "measured")
    assert (str(large), large.start, large.stop, large.runner_up) == ("ring", 1 << 20, None, "double_tree pieces=4")
    assert large.margin == pytest.approx(0.1)
    with pytest.raises(ScheduleError, match="'direct' for all_reduce lack 8 bytes"):
        Choices.by_times("all_reduce", 8, {"direct": {7: 1.0}, "ring": {8: 1.0}, "one_shot": {7: 1.0, 8: 1.0}})


def test_the_user_overrides_in_one_line() -> None:
    choices = Choices.by_closed_form(WIRE, 16).override("all_reduce", ">=64KiB", "ring rings=2")
    assert str(choices.pick("all_reduce", 16, 64 << 10)) == "ring rings=2"
    assert str(choices.pick("all_reduce", 5, 1 << 40)) == "ring rings=2"
    assert choices.pick("all_reduce", 16, (64 << 10) - 1).algorithm != "ring"
    assert choices.pick("all_gather", 16, 1 << 20).origin == "closed form"
    assert all(row.stop is not None and row.stop <= 64 << 10 for row in choices.rows[1:] if row.kind == "all_reduce")


def test_the_users_text() -> None:
    choices = Choices.parse(
        "all_reduce <64KiB recursive_doubling; all_reduce >=64KiB ring # large ones\n"
        "all_reduce world=16 local=4 1MiB-2MiB rails local=4 between=ring"
    )
    assert choices.pick("all_reduce", 3, 65535).algorithm == "recursive_doubling"
    assert choices.pick("all_reduce", 3, 65536).algorithm == "ring"
    assert choices.pick("all_reduce", 16, 1 << 20).algorithm == "ring"
    assert choices.pick("all_reduce", 16, 1 << 20, local=4).parameters == {"local": 4, "between": "ring"}
    with pytest.raises(ScheduleError, match="no choice covers broadcast of 8 bytes, world=3"):
        choices.pick("broadcast", 3, 8)
    whole = choices | Choices.by_closed_form(WIRE, 3)
    assert whole.pick("broadcast", 3, 8).origin == "closed form"
    assert whole.pick("all_reduce", 3, 8).origin == "user"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("all_reduce ring", "write it as"),
        ("all_reduce * rign", "'rign' is unknown"),
        ("allreduce * ring", "'allreduce' is unknown; there are all_reduce"),
        ("broadcast * ring", "ring serves all_reduce, reduce_scatter, all_gather, not broadcast"),
        ("all_reduce <64Kib2 ring", "size range"),
        ("all_reduce <64parsec ring", "'64parsec'"),
        ("all_reduce 2MiB-1MiB ring", "is empty"),
        ("all_reduce world=x * ring", "world=x; give a whole number"),
        ("all_reduce world=6 * hdrm", "powers of two"),
        ("all_reduce * ring rungs=2", "no parameter 'rungs'; there are: rings, orders"),
        ("all_reduce * ring rings", "'rings' is no parameter"),
    ],
)
def test_what_a_user_cannot_mean(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match="choice '.*" + reason):
        Choices.parse(text)


def test_a_row_for_any_group_says_when_it_cannot_serve_one() -> None:
    row = Choices.parse("all_reduce * hdrm").pick("all_reduce", 6, 8)
    with pytest.raises(ScheduleError, match="powers of two.*override it for this world"):
        row.build(Collective("all_reduce", 6))


def test_toml_round_trip() -> None:
    choices = Choices.parse("all_reduce 1KiB-1MiB torus at_once=true") | Choices.by_closed_form(WIRE, 16, local=4)
    assert from_toml(to_toml(choices)) == choices
    assert from_toml(to_toml(Choices())) == Choices()


@given(
    st.lists(
        st.builds(
            Choice,
            st.just("all_reduce"),
            st.sampled_from(["ring", "direct"]),
            world=st.none() | st.integers(1, 9),
            local=st.none() | st.integers(1, 9),
            start=st.integers(0, 1 << 40),
            stop=st.none() | st.integers(0, 1 << 40),
            nbytes=st.none() | st.integers(0, 1 << 40),
            seconds=st.none() | st.floats(0, 1e300),
            margin=st.none() | st.floats(0, 1e300),
            runner_up=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=9),
            origin=st.text(st.sampled_from('ab "\\#[]='), max_size=9),
        ),
        max_size=4,
    )
)
@settings(deadline=None, max_examples=60)
def test_any_table_round_trips(rows: list[Choice]) -> None:
    assert from_toml(to_toml(Choices(tuple(rows)))).rows == tuple(rows)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("choice = 3", r"\$\.choice is no list"),
        ("choices = []", r"\$\.choices is unknown"),
        ("[[choice]]\nkind = 'all_reduce'", r"\$\.choice\[0\]\.algorithm is missing"),
        ("[[choice]]\nkind = 3\nalgorithm = 'ring'", r"\$\.choice\[0\]\.kind: 3 is no str"),
        ("[[choice]]\nkind = 'all_reduce'\nalgorithm = 'rong'", r"\$\.choice\[0\]: algorithm 'rong' is unknown"),
        ("[[choice]]\nkind = 'all_reduce'\nalgorithm = 'ring'\nword = 3", r"\$\.choice\[0\]\.word is unknown"),
        ("[[choice]]\nkind = 'all_reduce'\nalgorithm = 'ring'\nworld = true", r"world: True is no int"),
        ("[[choice", "no TOML"),
    ],
)
def test_bad_files_say_where(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        from_toml(text)


def test_the_table_is_aligned() -> None:
    text = str(
        Choices.parse("all_reduce >=64KiB ring")
        | Choices.by_times("all_reduce", 8, {"ring": {8: 2e-3, 9: 2e-3}, "direct": {8: 1e-6, 9: 3e-3}})
    )
    assert text == (
        "collective  world  local  bytes     algorithm  at  time  runner-up  margin     from\n"
        "all_reduce  any    any    >=64KiB   ring       -   -     -          -          user\n"
        "all_reduce  8      1      <9B       direct     8B  1 us  ring       199900.0%  measured\n"
        "all_reduce  8      1      9B-64KiB  ring       9B  2 ms  direct     50.0%      measured\n"
    )


def test_ranges_are_exact_at_their_ends() -> None:
    for sizes, inside, outside in (
        ("<8", 7, 8),
        ("<=8", 8, 9),
        (">8", 9, 8),
        (">=8", 8, 7),
        ("8-9", 8, 9),
        ("1.5KiB-2kB", 1536, 2000),
    ):
        choices = Choices().override("barrier", sizes, "direct")
        assert choices.pick("barrier", 2, inside).algorithm == "direct"
        with pytest.raises(ScheduleError, match="no choice covers"):
            choices.pick("barrier", 2, outside)
