"""What becomes of the sockets at which Gloo listens."""

import os
import select
import socket

import pytest

from hocket.comm.engines._gloo import _take_no_more


def test_a_listening_socket_is_closed_its_connections_go_on_and_its_number_stays_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as waiting:
        place, number = listener.getsockname(), listener.fileno()
        waiting.register(number, select.EPOLLIN)
        with socket.create_connection(place) as mine:
            theirs, _ = listener.accept()
            with theirs:
                _take_no_more(number)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(place)
                mine.sendall(b"on")
                assert theirs.recv(2) == b"on"
                assert waiting.poll(0.05) == []  # whose thread would turn round and round
                waiting.unregister(number)  # as Gloo does when it ends
                os.fstat(number)
