"""Connections that last while nothing is said: a computation may be long, and what stands between hosts forgets."""

import socket
from typing import Final

_ASK_S: Final = 5
_ASK_TIMES: Final = 120


def keep_alive(one: socket.socket) -> None:
    """Have the kernel ask the other side, while nothing comes from it, whether it knows of the connection.

    It does not if it was ended while a link was cut, and who only receives would not hear of that. A link that stays
    cut ends the connection after ten minutes. A firewall, or what translates addresses, forgets connections by which
    nothing comes, some after half a minute, and then drops what is sent without a word: so it is asked often.
    """
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)


def give_up_after(one: socket.socket, seconds: float | None) -> None:
    """Have the kernel end a connection of which the other side's kernel has not answered for a time, or as before.

    A process there that stands still does not count: its kernel answers.

    Args:
        one: The connection; `keep_alive` knows it.
        seconds: The time; ten minutes at most. None for what `keep_alive` says.
    """
    most_ms = 0 if seconds is None else max(1, int(1000 * min(seconds, _ASK_S * _ASK_TIMES)))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)
