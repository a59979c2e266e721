"""The store of several hosts: what it does, and that it does nothing for strangers."""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.comm import CommError, rendezvous, secret_store, torch_adapter
from hocket.comm.engines import Gloo, own_sockets
from hocket.comm.secret_store import SecretError, SecretStore, StoreServer
from hocket.testing import deadline

from ..strangers import garbage, listening

SECRET = b"sixteen letters and more"
KEYS = st.sampled_from("abc")
VALUES = st.text("01", min_size=1, max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.integers(-9, 9)),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("compare_set"), KEYS, st.one_of(st.just(""), VALUES), VALUES),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("check"), st.lists(KEYS, min_size=1)),
    st.tuples(st.just("multi_set"), st.just(["a", "b"]), st.tuples(VALUES, VALUES).map(list)),
)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    one = StoreServer(("127.0.0.1", 0), SECRET)
    yield one
    one.close()


def joined(server: StoreServer, secret: bytes = SECRET) -> SecretStore:
    return SecretStore("127.0.0.1", server.port, secret, deadline(10))


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_it_answers_as_torch_s_hash_store_does(steps: list[tuple[object, ...]]) -> None:
    ours, torchs = joined(_shared()), dist.HashStore()
    prefix = dist.PrefixStore(f"{time.monotonic_ns()}/", ours)
    known: dict[str, None] = {}
    for name, *arguments in steps:
        if name == "num_keys":
            continue  # those of other examples are there, too
        if name == "append" and arguments[0] not in known:
            continue  # where the two of torch differ
        known.update(dict.fromkeys("abc" if name == "multi_set" else [str(arguments[0])]))
        found = [_answer(store, str(name), arguments) for store in (prefix, torchs)]
        assert found[0] == found[1], (name, arguments)
    for key in "abc":
        assert prefix.check([key]) == torchs.check([key])
        if torchs.check([key]):
            assert prefix.get(key) == torchs.get(key)


def _answer(store: dist.Store, name: str, arguments: list[object]) -> object:
    try:
        return getattr(store, name)(*arguments)
    except (ValueError, RuntimeError):  # a number is added to what is none
        return "refused"


_servers: list[StoreServer] = []


def _shared() -> StoreServer:
    if not _servers:
        _servers.append(StoreServer(("127.0.0.1", 0), SECRET))
    return _servers[0]


def test_waiting_ends_when_the_key_comes_or_the_time_is_over(server: StoreServer) -> None:
    store, other = joined(server), joined(server)
    threading.Timer(0.1, other.set, ("late", "1")).start()
    store.wait(["late"], timedelta(seconds=deadline(10)))
    with pytest.raises(dist.DistStoreError, match="never"):
        store.wait(["never"], timedelta(seconds=0.1))
    assert store.get("late") == b"1"


def _asking(port: int) -> list[bool]:
    """Return of each end of this process's connections to a port whether it asks for the other before half a minute."""
    found = []
    for one in own_sockets()[1]:
        with one.borrowed() as end:
            if port in (end.getsockname()[1], end.getpeername()[1]):
                asks = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                found.append(bool(asks) and end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 30)
    return found


def test_a_firewall_that_forgets_silent_connections_hears_of_a_store_s_before() -> None:
    server = StoreServer(("127.0.0.1", 0), SECRET)
    joined(server).set("here", "1")
    assert _asking(server.port) == [True, True]
    server.close()


def test_a_firewall_that_forgets_silent_connections_hears_of_torch_s_store_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (rendezvous.VARIABLE, "HOCKET_SECRET", "HOCKET_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    met = rendezvous._rendezvous(lambda url, timeout: iter([(store, 0, 1)]), "env://?rank=0&world_size=1")
    assert next(met) == (store, 0, 1)
    assert any(_asking(store.port))


def test_a_rank_that_is_cut_off_from_its_store_waits_no_longer_than_its_time_out(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a connection that nobody acknowledges; else it asks again for a quarter of an hour."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "HOCKET_SECRET": SECRET.decode()}
    at = {rendezvous.VARIABLE: f"127.0.0.1:{server.port} tcp://127.0.0.1:{server.port}/cut-off"}
    for name, value in {**place, **at, "HOCKET_TIMEOUT": "70"}.items():
        monkeypatch.setenv(name, value)
    store, *_ = next(rendezvous._rendezvous(None, "env://?rank=0&world_size=1"))
    most_ms: list[int] = []
    monkeypatch.setattr(SecretStore, "_received", _looking(SecretStore._received, most_ms))
    store.set("asked", "1")
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=0.1))
    assert set(most_ms) == {70_000}
    assert _gives_up_after_ms(secret_store._kept[-1]) == 0  # a link may be cut for long where nothing is asked


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EHOSTUNREACH, "No route to host; that host does not answer"),
        (errno.ECONNRESET, "rank 0, has ended"),
    ],
)
def test_who_cannot_reach_the_store_is_told_what_to_look_at(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    store = joined(server)

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "_received", fail)
    with pytest.raises(dist.DistNetworkError, match=f"at 127.0.0.1:{server.port} cannot be reached: .*{said}"):
        store.set("a", "1")


def test_a_rank_whose_store_is_not_there_is_told_where_to_look() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"nobody answers at 127.0.0.1:{port} .*refused.* see whether rank 0"):
        SecretStore("127.0.0.1", port, SECRET, 0.1)


def _gives_up_after_ms(store: SecretStore) -> int:
    return store._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def _looking(received: Callable[[SecretStore, int], bytes], most_ms: list[int]) -> Callable[[SecretStore, int], bytes]:
    def look(store: SecretStore, nbytes: int) -> bytes:
        most_ms.append(_gives_up_after_ms(store))
        return received(store, nbytes)

    return look


def test_who_has_another_secret_is_told_so(server: StoreServer) -> None:
    with pytest.raises(
        SecretError, match="does not hold this job's secret; give all hosts the same HOCKET_SECRET_FILE"
    ):
        joined(server, b"another secret of the same kind")


def test_garbage_and_silent_strangers_change_nothing(server: StoreServer) -> None:
    store = joined(server)
    store.set("before", "1")
    count = store.num_keys()
    thread = threading.Thread(target=garbage, args=([server.port], 20_000, 7))
    thread.start()
    while thread.is_alive():
        assert store.get("before") == b"1"
        store.add("rounds", 1)
    assert joined(server).num_keys() == count + 1


def test_a_user_without_a_home_directory_is_told_to_name_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)  # none of /etc/passwd
    with pytest.raises(rendezvous.NoSecretError, match="no home directory for a secret; .* HOCKET_SECRET_FILE=FILE"):
        rendezvous.own_secret_file()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(rendezvous.NoSecretError, match="no secret can be made in .*: Not a directory; .*SECRET_FILE"):
        rendezvous.own_secret_file()


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = rendezvous.own_secret_file()
    assert rendezvous.own_secret_file() == path
    assert (os.stat(path).st_mode & 0o777, len(rendezvous.read_secret(path))) == (0o600, 64)
    os.chmod(path, 0o644)
    with pytest.raises(rendezvous.NoSecretError, match=r"is open to others \(mode 644\)"):
        rendezvous.read_secret(path)
    monkeypatch.setenv("HOCKET_SECRET", "short")
    with pytest.raises(rendezvous.NoSecretError, match="has 5 characters; 16 is the least"):
        rendezvous.job_secret()


def _connected(gloos: list[Gloo]) -> None:
    with ThreadPoolExecutor(len(gloos)) as pool:
        list(pool.map(Gloo.connect, gloos))


def test_gloo_takes_nobody_who_has_not_read_the_store_and_then_nobody_at_all() -> None:
    store, waits = dist.HashStore(), timedelta(seconds=deadline(20))
    before = listening([os.getpid()])
    gloos = [Gloo(store, rank, 2, waits) for rank in range(2)]
    for gloo in gloos:
        gloo.loopback = True
    assert listening([os.getpid()]) == before  # nothing listens until it is needed
    _connected(gloos)
    assert listening([os.getpid()]) == before  # and when it has connected

    honest = Gloo(dist.PrefixStore("second/", store), 0, 2, waits)

    def intrude() -> None:
        place = dist.PrefixStore("gloo/", dist.PrefixStore("second/", store))
        engine = torch_adapter.process_group_gloo(place, 1, 2, waits)
        place.set("proof/1", bytes(32).hex())
        engine.send([torch.zeros(32, dtype=torch.uint8)], 0, 0x686F636B).wait()
        engine.recv([torch.zeros(32, dtype=torch.uint8)], 0, 0x686F636B).wait()

    intruder = threading.Thread(target=intrude)
    intruder.start()
    with pytest.raises(CommError, match="whoever connected as rank 1 is not that rank"):
        honest.connect()
    intruder.join()


def test_ranks_of_one_process_and_threads_that_open_and_close_sockets_do_not_confuse_connecting() -> None:
    over = threading.Event()

    def others() -> None:
        while not over.is_set():
            with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
                pass

    before = listening([os.getpid()])
    stranger = threading.Thread(target=others)
    stranger.start()
    try:
        for _ in range(30):
            store, waits = dist.HashStore(), timedelta(seconds=deadline(20))
            gloos = [Gloo(store, rank, 2, waits) for rank in range(2)]
            for gloo in gloos:
                gloo.loopback = True
            _connected(gloos)
            for gloo in gloos:
                gloo.end()
    finally:
        over.set()
        stranger.join()
    assert listening([os.getpid()]) == before


def test_who_was_pushed_out_by_strangers_tries_again_and_another_program_on_the_port_is_named() -> None:
    real = StoreServer(("127.0.0.1", 0), SECRET)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def push_out_then_carry() -> None:
        for nbytes in (0, 32):  # before the challenge, and after it
            first, _ = listener.accept()
            first.sendall(bytes(nbytes))
            first.close()
        client, _ = listener.accept()
        beyond = socket.create_connection(("127.0.0.1", real.port))
        for source, target, nbytes in ((beyond, client, 32), (client, beyond, 64), (beyond, client, 32)):
            target.sendall(source.recv(nbytes, socket.MSG_WAITALL))

    thread = threading.Thread(target=push_out_then_carry)
    thread.start()
    SecretStore("127.0.0.1", port, SECRET, deadline(10))
    thread.join()
    listener.close()
    real.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(ConnectionError, match=f"who listens at 127.0.0.1:{port} does not answer as this job's"):
            SecretStore("127.0.0.1", port, SECRET, 0.0)
        other.shutdown(socket.SHUT_RDWR)


def test_a_clone_answers_while_the_store_itself_waits(server: StoreServer) -> None:
    store = dist.PrefixStore("waits/", joined(server))
    waiting = threading.Thread(target=store.wait, args=(["late"], timedelta(seconds=60)))
    waiting.start()
    store.clone().set("late", "here")
    waiting.join(deadline(10))
    assert not waiting.is_alive()


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError):
        torch_adapter.ask(threading.Event().wait, 0.1)
    assert torch_adapter.ask(lambda: 3, deadline(10)) == 3
    with pytest.raises(KeyError):
        torch_adapter.ask(dict[str, int]().popitem, deadline(10))


def test_ranks_meet_with_a_secret_at_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET6) as free:
        try:
            free.bind(("::1", 0))
        except OSError:
            pytest.skip("needs IPv6")
        port = free.getsockname()[1]
    monkeypatch.delenv(rendezvous.VARIABLE, raising=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in (("MASTER_ADDR", "::1"), ("MASTER_PORT", str(port)), ("HOCKET_SECRET", "s" * 32)):
        monkeypatch.setenv(name, value)
    met = rendezvous._rendezvous(None, "env://?rank=0&world_size=1", timedelta(seconds=deadline(10)))
    store, rank, size = next(met)
    store.set("here", "yes")
    assert (store.get("here"), rank, size) == (b"yes", 0, 1)
    rendezvous._served.pop(f"tcp://[::1]:{port}/").close()
