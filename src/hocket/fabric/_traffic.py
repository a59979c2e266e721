"""Plain TCP traffic in one host, for the check of a fabric. Run by its path: only the standard library is imported.

    python -I -S _traffic.py PORT SECONDS CONNECTIONS_TO_COME [ADDRESS...]

Takes what comes, and sends to every address as fast as it goes, for so long. Prints a line when it listens; starts to
send when it reads one.
"""

import socket
import sys
import threading
import time

_PIECE = bytes(1 << 16)
_CONNECT_DEADLINE_S = 5.0


def main() -> None:
    """Listen, wait for the word, send."""
    port, seconds, coming = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    server = socket.create_server(("", port), backlog=64)
    threading.Thread(target=_take, args=(server, coming), daemon=True).start()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    end_s = time.monotonic() + seconds
    senders = [threading.Thread(target=_send, args=(goal, port, end_s)) for goal in sys.argv[4:]]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    time.sleep(max(0.0, end_s - time.monotonic()))


def _take(server: socket.socket, coming: int) -> None:
    for _ in range(coming):
        peer, _ = server.accept()
        threading.Thread(target=_discard, args=(peer,), daemon=True).start()


def _discard(peer: socket.socket) -> None:
    space = bytearray(1 << 18)
    try:
        while peer.recv_into(space):
            pass
    except OSError:
        return


def _send(goal: str, port: int, end_s: float) -> None:
    try:
        with socket.create_connection((goal, port), timeout=_CONNECT_DEADLINE_S) as peer:
            while (left_s := end_s - time.monotonic()) > 0:
                peer.settimeout(left_s)
                peer.sendall(_PIECE)
    except OSError:
        return


if __name__ == "__main__":
    main()
