import socket
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.comm import OperationRecord
from hocket.explain import explain, report
from hocket.explain._links import HostLink, slow_link
from hocket.profile import STEP
from hocket.profile._layout import LINK, PHASE
from hocket.profile._links import links_used
from hocket.profile._record import RankRecord


def test_the_kernel_counts_what_was_sent_and_nobody_elses_socket_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as mine:
        mine.bind(("127.0.0.2", 0))
        mine.connect(server.getsockname())
        peer, _ = server.accept()
        with peer:
            mine.sendall(b"x" * 100_000)
            got = 0
            while got < 100_000:
                got += len(peer.recv(1 << 16))
            end_s = time.monotonic() + 10
            while links_used()["127.0.0.2", "127.0.0.1"].nbytes < 100_000 and time.monotonic() < end_s:
                time.sleep(0.01)
            use = links_used()["127.0.0.2", "127.0.0.1"]
            assert 100_000 <= use.nbytes <= 100_001
            assert 0.0 < use.least_rtt_s <= use.rtt_s < 1.0
            peer.sendall(b"still open")
            assert mine.recv(10) == b"still open"


@given(
    st.integers(3, 9), st.integers(0, 8), st.sampled_from(["both", "sends", "receives", "one", "none"]),
    st.booleans(), st.floats(3.0, 50.0), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_slow_place_is_found_in_rings_and_meshes_and_none_where_all_are_alike(
    count: int, at: int, where: str, ring: bool, slower: float, random: np.random.RandomState
) -> None:
    at %= count
    links = []
    for a in range(count):
        for b in [(a + 1) % count] if ring else [b for b in range(count) if b != a]:
            slow = {
                "both": at in (a, b), "sends": a == at, "receives": b == at, "one": (a, b) == (at, (at + 1) % count),
                "none": False,
            }[where]  # fmt: skip
            rate = 100e6 * random.uniform(0.9, 1.1) / (slower if slow else 1.0)
            links.append(HostLink(f"h{a}", f"h{b}", 1 << 28, (1 << 28) / rate, 1e-3, 1e-4, 0))
    found = slow_link(links)
    if where == "none":
        assert found is None
        return
    assert found is not None
    assert found.rate_Bps == pytest.approx(100e6 / slower, rel=0.2)
    if ring and where != "both":  # a link of a ring is all that a host sends, and all that the next receives
        at, where = (at - 1) % count if where == "receives" else at, "one"
    place = {
        "both": f"the link of host h{at}", "sends": f"what host h{at} sends", "receives": f"what host h{at} receives",
        "one": f"the link from host h{at} to host h{(at + 1) % count}",
    }[where]  # fmt: skip
    assert found.place == place


@given(st.integers(5, 9), st.sampled_from(["both", "sends", "receives"]), st.randoms(use_true_random=False))
def test_hosts_whose_links_are_slow_are_told_together(count: int, where: str, random: np.random.RandomState) -> None:
    """As quick as the others, the link of one of two would make nothing quicker."""
    links = []
    for a in range(count):
        for b in {*range(count)} - {a}:
            slow = {"both": {a, b}, "sends": {a}, "receives": {b}}[where] & {1, 3}
            rate = 100e6 * random.uniform(0.9, 1.1) / (5.0 if slow else 1.0)
            links.append(HostLink(f"h{a}", f"h{b}", 1 << 28, (1 << 28) / rate, 1e-3, 1e-4, 0))
    found = slow_link(links)
    assert found is not None
    assert sorted(found.hosts) == ["h1", "h3"]
    assert found.rate_Bps == pytest.approx(20e6, rel=0.1)
    assert found.place.startswith("each link of hosts h" if where == "both" else "what hosts h")


def test_links_that_are_slow_between_many_hosts_are_no_place() -> None:
    """As on an emulated star of 8 hosts: what each host sends to the opposite one shares its cable most."""
    links = [
        HostLink(f"h{a}", f"h{b}", 10_000_000, 10 / (0.72 + 0.01 * a if (a - b) % 8 == 4 else 1.45), 0.02, 1e-5, 0)
        for a in range(8)
        for b in range(8)
        if a != b
    ]
    assert slow_link(links) is None
    # The way between two hosts, in both directions, is a place.
    links = [replace(one, busy_s=40.0) if {one.source, one.destination} == {"h1", "h6"} else one for one in links]
    found = slow_link(links)
    assert found is not None
    assert found.place == "the link from host h1 to host h6"


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch, slow: int, exposed_s: float = 0.02) -> None:
    """Write the records of a run on three hosts: steps of 10 ms and an all-reduce of 20 ms; one host's link is slow."""
    monkeypatch.setattr("hocket.profile._record.known_group", lambda name: (name, (0, 1, 2)))
    zero_s = time.perf_counter()
    for rank in range(3):
        monkeypatch.setenv("HOCKET_HOST", f"h{rank}")
        record = RankRecord(folder, rank, 3)
        begin_s = zero_s
        for step in range(1, 31):
            came_s = begin_s + 0.01
            end_s = came_s + exposed_s
            op = OperationRecord(
                "0", step, "all_reduce", 1 << 20, "float32", 3, "gloo", False, came_s, came_s, came_s, end_s, None,
                came_s,
            )  # fmt: skip
            record.operation_started(op)
            record.operation_finished(op)
            record.operation_waited(op, came_s, end_s)
            record.span(STEP, begin_s, end_s, seq=step)
            begin_s = end_s
            for peer in {0, 1, 2} - {rank}:
                rate = 2e6 if slow in (rank, peer) else 10e6
                record.row(
                    1, LINK, text=record.text((f"10.0.0.{rank}", f"10.0.0.{peer}")), nbytes=step << 20,
                    times=(end_s, (step << 20) / rate, 2e-3, 1e-5, 0.0),
                )  # fmt: skip
        record.ended()


def test_a_slow_link_is_the_first_verdict_and_a_row_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, monkeypatch, slow=1)
    found = explain(tmp_path)
    assert (found.verdicts[0].kind, found.verdicts[0].ranks) == ("slow link", (1,))
    assert found.verdicts[0].gain == pytest.approx(2 / 3 * 0.8, rel=0.01)
    assert "the link of host h1 is slow: it gives 2 MB/s" in found.verdicts[0].sentence
    assert not any(one.kind == "communication" for one in found.verdicts)
    page = report(found)
    assert "<h2>Links between hosts" in page
    assert page.index("<td>h0</td><td>h1</td>") < page.index("<td>h0</td><td>h2</td>"), "the slowest stand first"


def test_links_that_are_alike_and_links_that_do_not_matter_are_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "alike", monkeypatch, slow=7)
    assert [one.kind for one in explain(tmp_path / "alike").verdicts] == ["communication"]
    recorded(tmp_path / "hidden", monkeypatch, slow=1, exposed_s=0.0002)
    assert explain(tmp_path / "hidden").verdicts == ()


def test_a_stage_that_computes_longer_is_no_straggler_but_a_bad_cut(tmp_path: Path) -> None:
    zero_s = time.perf_counter()
    for rank in range(4):  # 2 data x 2 pipeline; ranks 2 and 3 hold the second stage
        record = RankRecord(tmp_path, rank, 4)
        axes = [["pipeline", 2], ["data", 2], ["tensor", 1]]
        record.text({"note": "plan", "value": {"name": "2 data x 2 pipeline", "axes": axes, "predicted": {}}})
        for step in range(30):
            begin_s = zero_s + 0.04 * step
            if rank < 2:
                op = OperationRecord(
                    "messages", 0, "recv", 4, "", 2, "message", True, begin_s, begin_s, begin_s,
                    begin_s + 0.03, None, begin_s,
                )  # fmt: skip
                record.operation_waited(op, begin_s, begin_s + 0.03)
            record.span(PHASE, begin_s, begin_s + 0.001, "optimizer")
            record.span(STEP, begin_s, begin_s + 0.04, seq=step + 1)
        record.ended()
    first, *others = explain(tmp_path).verdicts
    assert (first.kind, first.ranks) == ("unbalanced stages", (2, 3))
    assert "stage 1 of the pipeline computes 40 ms a step and the others 10 ms" in first.sentence
    assert first.gain == pytest.approx(15 / 40, rel=0.01)
    assert not any(one.kind in ("straggler", "bubbles") for one in others)


def test_of_ranks_that_all_died_the_one_that_the_others_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.profile._record.known_group", lambda name: (name, (0, 1, 2)))
    monkeypatch.setattr("hocket.profile._live.start_ticks", lambda pid: None)  # gone
    for rank in range(3):
        record = RankRecord(tmp_path, rank, 3)
        now_s = time.perf_counter()
        op = OperationRecord(
            "0", 1, "all_reduce", 4, "float32", 3, "gloo", False, now_s, now_s, now_s, now_s, None, now_s
        )
        record.operation_started(op)
        record.operation_finished(op)
        if rank != 1:
            record.operation_started(
                OperationRecord("0", 2, "all_reduce", 4, "float32", 3, "gloo", False, now_s, now_s)
            )  # fmt: skip
    (one,) = explain(tmp_path).verdicts
    assert (one.kind, one.ranks, one.confidence) == ("died", (1,), "medium")
    assert "all 3 ranks ended without a word, while the others waited for rank 1" in one.sentence
