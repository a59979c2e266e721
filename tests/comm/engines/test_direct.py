"""Short messages over connections of a rank's own, among ranks that are threads."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.comm import keep_alive
from hocket.comm.engines import DirectPoints, _direct, connect_directly
from hocket.comm.scheduled import FlatFrames, frame_peers
from hocket.comm.transport import CommError, PeerDiedError
from hocket.testing import deadline


def _run(size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns or raises on each rank."""
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
        assert not thread.is_alive(), "a rank hangs"
    return results


def _world(size: int, store: Any = None, seconds: float = 20) -> list[DirectPoints]:
    """All connected with all."""
    store = store or dist.HashStore()
    waits = timedelta(seconds=deadline(seconds))
    found = _run(size, lambda rank: connect_directly(store, rank, size, range(size), "127.0.0.1", waits))
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def _bytes(seed: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(nbytes)), dtype=torch.uint8)


@settings(max_examples=15)
@given(
    st.integers(2, 4),
    st.lists(st.sampled_from([1, 3, 32, 5_000, 131_068, 131_072, 3_000_000]), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_all_send_to_all_at_once_and_every_byte_arrives_in_order(size: int, lengths: list[int], seed: int) -> None:
    world = _world(size)

    def body(rank: int) -> bool:
        others = [one for one in range(size) if one != rank]
        sends = []
        for number, nbytes in enumerate(lengths):  # far more than sockets take before anyone reads
            sends += [world[rank].send(_bytes(seed + 100 * rank + number, nbytes), peer) for peer in others]
        for peer in others:
            for number, nbytes in enumerate(lengths):
                place = torch.zeros(max(lengths), dtype=torch.uint8)
                world[rank].receive(place, peer).wait(deadline(20))
                assert torch.equal(place[:nbytes], _bytes(seed + 100 * peer + number, nbytes))
        for one in sends:
            one.wait(deadline(20))
        return True

    assert _run(size, body) == [True] * size
    for points in world:
        points.close()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_frames_need_no_other_connections_than_those_of_their_peers(size: int) -> None:
    store, waits = dist.HashStore(), timedelta(seconds=deadline(20))

    def body(rank: int) -> list[list[bytes]]:
        peers = frame_peers(rank, size)
        points = connect_directly(store, rank, size, peers, "127.0.0.1", waits)
        assert points is not None
        assert set(points.connections) == peers
        frames = FlatFrames(points, rank, size, 4096)
        found = []
        for number in range(20):
            frames.begin(bytes([number]) * 24, _bytes(rank, 16 + 16 * number), deadline(20))
            came = frames.finish(deadline(20))
            assert all(torch.equal(one.payload, _bytes(r, 16 + 16 * number)) for r, one in enumerate(came))
            found.append([one.contract for one in came])
        return found

    assert _run(size, body) == [[[bytes([number]) * 24] * size for number in range(20)]] * size


def test_who_does_not_answer_in_time_or_has_left_is_named() -> None:
    first, second = _world(2)
    place = torch.zeros(8, dtype=torch.uint8)
    begin_s = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1 of the group failed: nothing came within 0\.2 s") as raised:
        first.receive(place, 1).wait(0.2)
    assert raised.value.peer == 1
    assert 0.2 <= time.monotonic() - begin_s < deadline(5)
    second.send(torch.ones(4, dtype=torch.uint8), 0)
    second.close()
    first.receive(place, 1).wait(deadline(5))  # what was sent before is not lost
    assert place.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(CommError, match="rank 1 of the group failed: it has closed its connection"):
        first.receive(place, 1).wait(deadline(5))

    def send_on() -> None:
        for _ in range(1000):
            first.send(torch.zeros(60_000, dtype=torch.uint8), 1).wait(deadline(1))

    with pytest.raises(CommError, match="rank 1 of the group failed"):
        send_on()


def test_a_rank_that_waits_hears_of_its_own_end() -> None:
    first, _second = _world(2)
    waiting = threading.Timer(0.1, first.close)
    waiting.start()
    with pytest.raises(CommError, match="it has closed its connection"):
        first.receive(torch.zeros(8, dtype=torch.uint8), 1).wait(deadline(20))


def test_a_message_longer_than_its_place_is_refused() -> None:
    first, second = _world(2)
    second.send(torch.zeros(100, dtype=torch.uint8), 0)
    with pytest.raises(CommError, match="it sends 100 bytes where at most 99 are expected"):
        first.receive(torch.zeros(99, dtype=torch.uint8), 1).wait(deadline(5))


def test_strangers_are_neither_taken_nor_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, strangers = dist.HashStore(), list[socket.socket]()
    waits = timedelta(seconds=deadline(30))

    def body(rank: int) -> DirectPoints | None:
        if rank == 1:
            store.wait(["direct/0"], waits)
            port = int(store.get("direct/0").split()[0])
            for number in range(300):  # more than are kept; silent ones, talkative ones, and one who says he is rank 1
                one = socket.create_connection(("127.0.0.1", port), deadline(5))
                with contextlib.suppress(OSError):
                    if number % 3 == 1:
                        one.sendall(random.Random(number).randbytes(1000))
                    elif number % 3 == 2:
                        one.sendall(b"\1\0\0\0" + bytes(32))
                strangers.append(one)
        return connect_directly(store, rank, 2, [1 - rank], "127.0.0.1", waits)

    first, second = _run(2, body)
    assert isinstance(first, DirectPoints), first
    assert isinstance(second, DirectPoints), second
    place = torch.zeros(8, dtype=torch.uint8)
    second.send(torch.full((8,), 7, dtype=torch.uint8), 0)
    first.receive(place, 1).wait(deadline(5))
    assert place.tolist() == [7] * 8
    port = int(store.get("direct/0").split()[0])
    with pytest.raises(ConnectionRefusedError):  # nothing listens any more
        socket.create_connection(("127.0.0.1", port), 1)
    for one in strangers:
        one.close()


def test_who_was_pushed_out_by_strangers_tries_again() -> None:
    store, waits = dist.HashStore(), timedelta(seconds=deadline(20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proof = bytes(range(32))
        store.set("direct/0", f"{listener.getsockname()[1]} {proof.hex()} 127.0.0.1")

        def body(rank: int) -> DirectPoints | None:
            if rank == 1:
                return connect_directly(store, 1, 2, [0], "127.0.0.1", waits)
            listener.accept()[0].close()
            listener.accept()[0].close()
            one, _ = listener.accept()
            assert one.recv(36, socket.MSG_WAITALL) == b"\1\0\0\0" + proof
            one.sendall(bytes.fromhex(store.get("direct/1").decode().split()[1]))
            one.recv(1)  # until the other ends
            return None

        second = None

        def watched(rank: int) -> Any:
            nonlocal second
            found = body(rank)
            if rank == 1:
                second = found
                assert found is not None
                found.close()
            return found

        _, found = _run(2, watched)
        assert isinstance(found, DirectPoints), found


def test_an_impostor_and_nobody_at_all_are_named() -> None:
    store, waits = dist.HashStore(), timedelta(seconds=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set("direct/0", f"{listener.getsockname()[1]} {bytes(32).hex()} 127.0.0.1")

        def body(rank: int) -> Any:
            if rank == 1:
                return connect_directly(store, 1, 2, [0], "127.0.0.1", waits)
            one, _ = listener.accept()
            one.sendall(bytes(32))
            return one

        one, error = _run(2, body)
        one.close()
    assert isinstance(error, CommError)
    assert "rank 0 of the group cannot be reached: whoever listens there has not read the group's store" in str(error)
    with pytest.raises(CommError, match="rank 1 of the group cannot be reached: it has not come"):
        connect_directly(dist.HashStore(), 0, 2, [1], "127.0.0.1", timedelta(seconds=0.3))
    absent = dist.HashStore()
    absent.set("direct/1", f"1 {bytes(32).hex()} 127.0.0.1")  # rank 1 does not come
    with pytest.raises(CommError, match="rank 1 of the group cannot be reached: it has not connected in time"):
        connect_directly(absent, 0, 2, [1], "127.0.0.1", timedelta(seconds=0.3))


def test_all_go_another_way_where_one_does_not_know_its_address() -> None:
    store, waits = dist.HashStore(), timedelta(seconds=deadline(20))

    def body(rank: int) -> DirectPoints | None:
        return connect_directly(store, rank, 3, range(3), None if rank == 1 else "127.0.0.1", waits)

    assert _run(3, body) == [None] * 3


def test_a_connection_that_was_ended_while_the_link_was_cut_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "_ASK_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        theirs, _ = listener.accept()
        points = DirectPoints({1: _direct._Connection(mine, 1)})
        try:
            theirs.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: its end is not told
        except PermissionError:
            pytest.skip("ending a connection without a word takes CAP_NET_ADMIN")
        theirs.close()
        with pytest.raises(PeerDiedError, match="rank 1 of the group failed: .*reset"):
            points.receive(torch.zeros(8), 1).wait(deadline(20))


def test_unread_messages_of_a_rank_that_is_gone_do_not_hide_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        theirs, _ = listener.accept()
        points = DirectPoints({1: _direct._Connection(mine, 1)})
        with theirs:
            theirs.sendall(b"frame")
            assert points.ended() == set()
        end_s = time.monotonic() + deadline(5)
        while points.ended() != {1}:
            assert time.monotonic() < end_s


def test_an_address_of_loopback_that_nobody_answers_is_explained() -> None:
    """Another host's /etc/hosts had named it 127.0.1.1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(CommError, match="set GLOO_SOCKET_IFNAME on it"):
        _direct._call(f"{port} secret 127.0.1.1", 1, 0, time.monotonic() + deadline(5))
