"""Clients that break the rules harm themselves only; members that die or stall end their group, by name and at once."""

import random
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from hocket.aggregator import (
    AggregationClient,
    AggregationError,
    AggregatorLostError,
    ElementType,
    FailCode,
    GroupFailedError,
    Kind,
    Level,
    Limits,
    Operator,
)
from hocket.aggregator import _codec as codec
from hocket.aggregator import _frames as wire
from hocket.aggregator._handshake import key_of, prove
from hocket.testing import deadline

from .world import TOKEN, LongWire, aggregators, members, members_of_tree

OTHER = b"another token, also long enough"


def all_reduce(group, numel=1000, timeout_s=10.0, value=1):
    data = np.full(numel, value, dtype=np.int32)
    result = np.zeros_like(data)
    group.post(
        Kind.ALL_REDUCE,
        data.view(np.uint8),
        result.view(np.uint8),
        operator=Operator.SUM,
        element=ElementType.INT32,
        timeout_s=deadline(timeout_s),
    ).wait()
    return result


def still_serves(server, **settings):
    results = members(server, 3, all_reduce, name=secrets.token_hex(4), **settings)
    assert all((result == 3).all() for result in results)


def _die(client):
    client._link.sock.close()
    client.error = AggregatorLostError("died")


class Raw:
    """A client that says what it likes."""

    def __init__(self, server, token=TOKEN, greet=True):
        self.sock = socket.create_connection(server.address, 5)
        self.sock.settimeout(deadline(5))
        if greet:
            nonce = bytes(32)
            self.say(wire.Hello(1, 1, key_of(token), nonce))
            challenge = codec.decode(wire.FrameType.CHALLENGE, 0, self.frame()[1])
            self.say(wire.Proof(prove(token, b"client", 1, nonce, challenge.nonce)))
            assert self.frame()[0] == wire.FrameType.WELCOME

    def say(self, *frames):
        self.sock.sendall(b"".join(frame if isinstance(frame, bytes) else codec.encode(frame) for frame in frames))

    def exactly(self, nbytes):
        found = b""
        while len(found) < nbytes:
            more = self.sock.recv(nbytes - len(found))
            if not more:
                raise EOFError
            found += more
        return found

    def frame(self):
        _, kind, _, length = codec.HEADER.unpack(self.exactly(8))
        return kind, self.exactly(length)

    def dropped(self):
        """The reason that the server gives before it closes."""
        reason = ""
        try:
            while True:
                kind, body = self.frame()
                if kind == wire.FrameType.REFUSE:
                    reason = body.decode()
        except (EOFError, ConnectionError):
            return reason

    def join_alone(self):
        self.say(wire.Join(1, 1, (Level(1, 0, 0, 1),), b"alone", b"loner"))
        assert self.frame()[0] == wire.FrameType.JOINED


OPEN = wire.Open(1, 1, Kind.ALL_REDUCE, Operator.SUM, ElementType.INT32, 0, 64, 64, 5000)

SINS = {
    "garbage": ([b"GET / HTTP/1.1\r\n\r\n"], "begins with byte"),
    "an unknown type": ([codec.HEADER.pack(wire.MAGIC, 99, 0, 0)], "type 99"),
    "too long": ([codec.HEADER.pack(wire.MAGIC, wire.FrameType.JOIN, 1, 1 << 30)], "JOIN frame of 1073741824 bytes"),
    "a segment too long": ([codec.HEADER.pack(wire.MAGIC, wire.FrameType.DATA, 1, 1 << 30)], "DATA frame of 107"),
    "a frame of the server's": ([wire.Joined(1, 1)], "JOINED frame, which may not come now"),
    "a group it is not in": ([wire.Leave(7)], "group 7, which this client has not joined"),
    "an operation of no group": ([OPEN._replace(group=3)], "group 3"),
    "an operation out of turn": ([OPEN._replace(sequence=2)], "operation 2 after 0"),
    "a root outside": ([OPEN._replace(root=1)], "root 1 in a group of 1"),
    "a segment of nothing": ([codec.data_head(1, 1, 0, 64), bytes(64)], "which is not under way"),
    "a segment that is not next": ([OPEN, codec.data_head(1, 1, 16, 48), bytes(48)], "next is 0"),
    "a segment cut wrongly": ([OPEN, codec.data_head(1, 1, 0, 32), bytes(32)], "next is 0"),
    "a confirmation of nothing": ([wire.Ack(1, 5)], "ACK of operation 5"),
    "a confirmation where none is due": ([OPEN, wire.Ack(1, 1)], "ACK of operation 1"),
    "a confirmation before its part": ([OPEN._replace(kind=Kind.REDUCE), wire.Ack(1, 1)], "ACK of operation 1"),
    "a handle out of turn": ([wire.Join(9, 1, (Level(1, 0, 0, 1),), b"x", b"")], "group 9 after group 1"),
}


@pytest.fixture(scope="module")
def shared():
    with aggregators(tokens=(TOKEN, OTHER)) as server:
        yield server


@pytest.mark.parametrize(("frames", "reason"), SINS.values(), ids=SINS)
def test_a_client_that_breaks_the_protocol_is_dropped_with_a_reason_and_alone(shared, caplog, frames, reason):
    def pair(position):
        client = AggregationClient(shared.address, TOKEN)
        group = client.join(f"beside {reason}", 2, position)
        group.wait(deadline(10))
        results = [all_reduce(group, 5000) for _ in range(30)]
        client.close()
        return all((result == 2).all() for result in results)

    with ThreadPoolExecutor(2) as pool:
        beside = pool.map(pair, range(2))
        raw = Raw(shared)
        raw.join_alone()
        raw.say(*frames)
        assert reason in raw.dropped()
        assert list(beside) == [True, True]
    assert reason in caplog.text


def test_before_the_proof_nothing_but_the_greeting_is_heard(shared):
    for frames, reason in [
        ([wire.Join(1, 1, (Level(1, 0, 0, 1),), b"x", b"")], "JOIN frame, which may not come now"),
        ([wire.Hello(1, 1, b"unknown!", bytes(32))], "a token that this aggregator does not know"),
        ([wire.Hello(7, 9, key_of(TOKEN), bytes(32))], "versions 7 to 9"),
        ([wire.Hello(1, 1, key_of(TOKEN), bytes(32)), wire.Proof(bytes(32))], "a proof that does not hold"),
    ]:
        raw = Raw(shared, greet=False)
        raw.say(*frames)
        assert reason in raw.dropped()
    still_serves(shared)


def test_a_recorded_proof_does_not_serve_again(shared):
    first = Raw(shared, greet=False)
    first.say(wire.Hello(1, 1, key_of(TOKEN), bytes(32)))
    challenge = codec.decode(wire.FrameType.CHALLENGE, 0, first.frame()[1])
    proof = wire.Proof(prove(TOKEN, b"client", 1, bytes(32), challenge.nonce))
    first.say(proof)
    assert first.frame()[0] == wire.FrameType.WELCOME
    second = Raw(shared, greet=False)
    second.say(wire.Hello(1, 1, key_of(TOKEN), bytes(32)), proof)
    assert "a proof that does not hold" in second.dropped()


def test_the_server_must_prove_itself_too():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor():
            sock, _ = listener.accept()
            sock.recv(1000)
            sock.sendall(codec.encode(wire.Challenge(1, bytes(32), bytes(32))))
            sock.recv(1000)
            sock.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AggregatorLostError, match="does not hold the token"):
            AggregationClient(listener.getsockname()[:2], TOKEN)
        thread.join()


def test_the_token_never_travels():
    with aggregators() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        seen = bytearray()

        def carry(source, target):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

        def between():
            client, _ = listener.accept()
            beyond = socket.create_connection(server.address)
            threads = [threading.Thread(target=carry, args=pair) for pair in ((client, beyond), (beyond, client))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        thread = threading.Thread(target=between)
        thread.start()
        client = AggregationClient(listener.getsockname()[:2], TOKEN)
        group = client.join("seen", 1, 0)
        group.wait(deadline(5))
        all_reduce(group)
        client.close()
        thread.join(deadline(10))
        assert len(seen) > 8000
        assert TOKEN not in seen


def test_jobs_with_different_tokens_do_not_meet(shared):
    first = AggregationClient(shared.address, TOKEN)
    other = AggregationClient(shared.address, OTHER)
    one, two = first.join("same name", 2, 0), other.join("same name", 2, 1)
    with pytest.raises(GroupFailedError, match="for all members to come"):
        one.wait(0.3)
    assert not two.generation
    first.close()
    other.close()


@pytest.mark.parametrize("seed", range(4))
def test_noise_at_any_point_of_the_conversation(shared, seed):
    draw = random.Random(seed)
    for _ in range(12):
        raw = Raw(shared, greet=draw.random() < 0.7)
        good = [
            codec.encode(wire.Join(1, 2, (Level(2, 0, 0, 1),), secrets.token_bytes(4), b"noisy")),
            codec.encode(OPEN),
            codec.data_head(1, 1, 0, 64) + bytes(64),
            codec.encode(wire.Ping(3)),
        ]
        stream = bytearray(b"".join(good[: draw.randint(0, 4)]))
        for _ in range(draw.randint(0, 3)):
            if stream:
                stream[draw.randrange(len(stream))] = draw.randrange(256)
        stream += draw.randbytes(draw.randint(0, 200))
        try:
            raw.sock.sendall(stream)
        except OSError:
            continue
        finally:
            raw.sock.close()
    still_serves(shared)


@pytest.mark.long
def test_a_flood_of_questions_without_reading_is_ended(shared):
    raw = Raw(shared)
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    pings = codec.encode(wire.Ping(1)) * 4096
    with pytest.raises((ConnectionError, TimeoutError)):  # noqa: PT012
        for _ in range(2000):
            raw.sock.sendall(pings)
    still_serves(shared)


@pytest.mark.long
def test_strangers_are_few_and_have_little_time():
    with aggregators(limits=Limits(connections=16, hello_s=deadline(0.5))) as server:
        strangers = [socket.create_connection(server.address) for _ in range(12)]
        time.sleep(deadline(1.2))
        for sock in strangers:
            sock.settimeout(deadline(2))
            with pytest.raises((ConnectionError, EOFError)):  # noqa: PT012
                while sock.recv(1000):
                    pass
                raise EOFError
        still_serves(server)
        assert server.stats().refused == 12


def test_strangers_keep_no_client_out():
    with aggregators(limits=Limits(connections=16, hello_s=deadline(60))) as server:
        strangers = [socket.create_connection(server.address) for _ in range(12)]
        still_serves(server)  # a new client, while four of them sit there; it had been kept out for a minute
        assert server.stats().refused >= 8
        for sock in strangers:
            sock.close()


def test_who_finds_no_place_is_told_so():
    with aggregators(limits=Limits(connections=2)) as server:
        clients = [AggregationClient(server.address, TOKEN) for _ in range(2)]
        for _ in range(3):
            with pytest.raises(AggregatorLostError, match="2 connections: no more are taken"):
                AggregationClient(server.address, TOKEN)
        for client in clients:
            client.close()


def test_who_listens_and_says_nothing_is_no_aggregator():
    silent = pytest.raises(AggregatorLostError, match="no time left to be let in")
    with socket.create_server(("127.0.0.1", 0)) as listener, silent:
        AggregationClient(listener.getsockname()[:2], TOKEN, timeout_s=0.2, stall_s=60.0)


def test_a_group_of_a_connection_that_has_ended_is_an_error_of_the_connection():
    with aggregators() as server:
        client = AggregationClient(server.address, TOKEN)
    for _ in range(3):
        with pytest.raises(AggregatorLostError, match="is lost"):
            client.join("late", 1, 0)


def test_whoever_has_all_the_time_there_is_gets_it():
    with aggregators(limits=Limits(stall_s=float("inf"))) as server:
        still_serves(server, stall_s=float("inf"))


def test_quotas_for_groups_members_operations_and_bytes():
    limits = Limits(groups=3, members=4, operations=2, nbytes=1 << 23, window_nbytes=1 << 20)
    with aggregators(limits=limits) as server:
        client = AggregationClient(server.address, TOKEN)
        with pytest.raises(GroupFailedError, match="4 are allowed") as error:
            client.join("too many", 5, 0).wait(deadline(5))
        assert error.value.code == FailCode.QUOTA
        kept = [client.join(f"g{i}", size, 0) for i, size in enumerate((4, 3))]
        with pytest.raises(GroupFailedError, match="2097152 bytes and 1048576 are left"):
            client.join("too much", 2, 0).wait(deadline(5))
        kept.append(client.join("last", 1, 0))
        kept[-1].wait(deadline(5))
        with pytest.raises(GroupFailedError, match="3 groups already"):
            client.join("one more", 1, 0).wait(deadline(5))
        works = [kept[-1].post(Kind.BARRIER, None, None) for _ in range(10)]  # the client keeps to the limit by itself
        for work in works:
            work.wait()
        client.close()
        raw = Raw(server)
        raw.say(wire.Join(1, 2, (Level(2, 0, 0, 1),), b"pair", b""))
        second = Raw(server)
        second.say(wire.Join(1, 2, (Level(2, 1, 1, 1),), b"pair", b""))
        assert raw.frame()[0] == wire.FrameType.JOINED
        raw.say(*[OPEN._replace(sequence=n) for n in (1, 2, 3)])
        assert "more than 2 operations" in raw.dropped()
        assert server._directory._reserved_nbytes == 0


def test_the_window_is_enforced():
    limits = Limits(window_nbytes=1 << 12, segment_nbytes=1 << 12)
    with aggregators(limits=limits) as server:
        raw, other = Raw(server), Raw(server)
        for position, one in enumerate((raw, other)):
            one.say(wire.Join(1, 2, (Level(2, position, position, 1),), b"pair", b""))
        assert raw.frame()[0] == wire.FrameType.JOINED
        segment = 1 << 12
        raw.say(OPEN._replace(nbytes=4 * segment, segment_nbytes=segment))
        raw.say(codec.data_head(1, 1, 0, segment), bytes(segment), codec.data_head(1, 1, segment, segment))
        assert "more than 4096 bytes in flight" in raw.dropped()


def _outcomes(server, total, action):
    """What `action(position, client, group)` returns or raises for every member."""

    def one(position):
        client = AggregationClient(server.address, TOKEN)
        try:
            group = client.join("doomed", total, position, label=f"rank {position}")
            group.wait(deadline(10))
            return action(position, client, group)
        except Exception as error:
            return error, time.monotonic()
        finally:
            client.close()

    with ThreadPoolExecutor(total) as pool:
        return list(pool.map(one, range(total)))


def test_a_member_that_dies_ends_the_operation_on_all_others_at_once_and_by_name():
    died_s = []

    def action(position, client, group):
        all_reduce(group)
        if position == 1:
            time.sleep(0.3)
            died_s.append(time.monotonic())
            _die(client)
            return None
        return all_reduce(group, 1_000_000, timeout_s=60)

    with aggregators() as server:
        outcomes = _outcomes(server, 4, action)
        for position in (0, 2, 3):
            error, when_s = outcomes[position]
            assert isinstance(error, GroupFailedError)
            assert (error.code, error.member, error.sequence) == (FailCode.MEMBER_LOST, 1, 2)
            assert "rank 1" in str(error)
            assert when_s - died_s[0] < deadline(1.0)
        still_serves(server)


@pytest.mark.long
def test_a_member_that_does_not_come_is_named_when_the_time_is_over():
    def action(position, client, group):
        if position == 2:
            time.sleep(deadline(2.0))
            return None
        return all_reduce(group, timeout_s=1.0)

    with aggregators() as server:
        error, _ = _outcomes(server, 3, action)[0]
    assert error.code == FailCode.TIMEOUT
    assert error.member == 2
    assert "still waits for rank 2" in str(error)


def test_members_that_ask_for_different_things_all_hear_of_both():
    def action(position, client, group):
        return all_reduce(group, 1000 + position // 2)

    with aggregators() as server:
        for error, _ in _outcomes(server, 4, action):
            assert error.code == FailCode.MISMATCH
            assert "4000 bytes" in str(error)
            assert "4004 bytes" in str(error)


def test_a_member_that_stops_reading_is_dropped_and_its_group_told():
    limits = Limits(stall_s=1.0)
    with aggregators(limits=limits) as server:
        lazy = Raw(server)
        lazy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        segment, count = 1 << 18, 200

        def eager():
            client = AggregationClient(server.address, TOKEN)
            group = client.join("mixed", 2, 0, label="rank 0")
            group.wait(deadline(10))
            data = np.ones(segment * count, dtype=np.uint8)
            work = group.post(Kind.BROADCAST, data, None, timeout_s=deadline(30), segment=segment)
            try:
                work.wait()
            except GroupFailedError as error:
                return error
            finally:
                client.close()

        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(eager)
            lazy.say(wire.Join(1, 2, (Level(2, 1, 1, 1),), b"mixed", b"rank 1"))
            assert lazy.frame()[0] == wire.FrameType.JOINED
            lazy.say(
                wire.Open(1, 1, Kind.BROADCAST, Operator.NONE, ElementType.UINT8, 0, segment * count, segment, 30_000)
            )
            error = outcome.result(deadline(20))
        assert error.member == 1
        assert "taken nothing of what waits for it for 1 s" in str(error)
        held = server._directory._pool._kept_nbytes
        assert held <= 4 * limits.window_nbytes
        still_serves(server)


def test_a_stopped_aggregator_is_noticed_by_its_silence():
    noticed = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def fall_silent():
            sock, _ = listener.accept()
            nonce = codec.decode(wire.FrameType.HELLO, 0, sock.recv(1000)[8:]).nonce
            sock.sendall(codec.encode(wire.Challenge(1, bytes(32), prove(TOKEN, b"server", 1, nonce, bytes(32)))))
            sock.recv(1000)
            sock.sendall(codec.encode(wire.Welcome(1 << 16, 1 << 20, 4, 4)))
            sock.recv(1000)
            sock.sendall(codec.encode(wire.Joined(1, 5)))
            noticed.wait(deadline(60))
            sock.close()

        thread = threading.Thread(target=fall_silent)
        thread.start()
        client = AggregationClient(listener.getsockname()[:2], TOKEN, stall_s=0.8)
        group = client.join("quiet", 2, 0)
        group.wait(deadline(5))
        begin_s = time.monotonic()
        with pytest.raises(AggregatorLostError, match="has not answered"):
            all_reduce(group, timeout_s=30)
        assert time.monotonic() - begin_s < deadline(2.0)
        noticed.set()
        thread.join()


def _struck_tree(servers, strike):
    """What four members below two leaves meet in an operation before which the last of them does `strike(group)`."""

    def action(group):
        all_reduce(group)
        if group.position == 3:
            strike(group)
        try:
            return all_reduce(group, 500_000, timeout_s=20)
        except AggregationError as error:
            return error

    return members_of_tree(servers, (2, 2), action)


def test_a_leaf_that_dies_is_known_by_name_in_the_whole_tree():
    with aggregators(3) as servers:

        def strike(group):
            time.sleep(0.2)
            servers[2].stop()

        outcomes = _struck_tree(servers, strike)
        assert all(isinstance(outcome, AggregationError) for outcome in outcomes)
        assert isinstance(outcomes[0], GroupFailedError)
        assert "agg1" in str(outcomes[0]) or "agg2" in str(outcomes[0])


def test_a_member_of_another_leaf_that_dies_is_known_by_name():
    with aggregators(3) as servers:
        outcomes = _struck_tree(servers, lambda group: _die(group.client))[:3]
        assert [(one.code, one.member, "rank 3" in str(one)) for one in outcomes] == [
            (FailCode.MEMBER_LOST, 3, True)
        ] * 3


def silence_between_aggregators(stall_s):
    """Returns what members of two leaves are told, one of which is cut off from the root after a while of nothing."""
    limits = Limits(stall_s=stall_s)
    reached = threading.Barrier(3)
    with aggregators(limits=limits) as root:
        wire = LongWire(root)
        with (
            aggregators(limits=limits, parent=wire.address) as far,
            aggregators(limits=limits, parent=root.address) as near,
        ):

            def action(group):
                try:
                    all_reduce(group)
                    time.sleep(1.5 * stall_s)  # nobody asks for anything: that is no silence
                    all_reduce(group)
                    reached.wait(deadline(20))
                    wire.cut.set()
                    return all_reduce(group, timeout_s=30)
                except AggregationError as error:
                    reached.abort()
                    return error
                except threading.BrokenBarrierError:
                    return None

            outcomes = members_of_tree([root, far, near], (2, 1), action)
        wire.close()
    return outcomes


@pytest.mark.long
def test_silence_between_aggregators_is_noticed_on_both_sides():
    expected = [FailCode.PARENT_LOST, FailCode.PARENT_LOST, FailCode.MEMBER_LOST]
    for stall_s in (0.8, 1.6, 3.2, 6.4):  # a busy machine is silent, too: then for longer
        outcomes = silence_between_aggregators(stall_s)
        if [getattr(outcome, "code", None) for outcome in outcomes] == expected:
            break
    assert [getattr(outcome, "code", None) for outcome in outcomes] == expected, outcomes
    assert all("no answer for" in str(outcome) for outcome in outcomes)


def test_a_leaf_takes_no_reason_back_while_more_comes_from_above():
    def flood(sock, over):
        with suppress(OSError):
            while not over.wait(0.001):
                sock.sendall(codec.encode(wire.Pong(0)) * 100)

    with socket.create_server(("127.0.0.1", 0)) as above, aggregators(parent=above.getsockname()) as leaf:
        client = AggregationClient(leaf.address, TOKEN)
        client.join("tree", 2, 0, levels=(Level(1, 0, 0, 1), Level(2, 0, 0, 1)), label="rank 0")
        sock, _ = above.accept()
        nonce = codec.decode(wire.FrameType.HELLO, 0, sock.recv(1000)[8:]).nonce
        sock.sendall(codec.encode(wire.Challenge(1, bytes(32), prove(TOKEN, b"server", 1, nonce, bytes(32)))))
        sock.recv(1000)
        sock.sendall(codec.encode(wire.Welcome(1 << 16, 1 << 20, 4, 4)) + codec.encode(wire.Joined(1, 5)))
        over = threading.Event()
        flooding = threading.Thread(target=flood, args=(sock, over))
        flooding.start()
        time.sleep(0.1)
        _die(client)
        said = b""
        while part := sock.recv(1000):  # to a proper end: a reset could have thrown away what was said
            said += part
        over.set()
        flooding.join()
        sock.close()
    assert b"rank 0" in said
    assert b"is gone" in said
