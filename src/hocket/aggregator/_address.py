"""HOST:PORT as users write it."""

from __future__ import annotations

import socket


class AddressError(ValueError):
    """A text that names no address; the message says what to write."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`; the host may be left out, and is then 0.0.0.0.

    Raises:
        AddressError: it is not of that form, or the host does not resolve.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not int(port) < 65536:
        raise AddressError(f"{text!r} is no address; write HOST:PORT, for example 10.0.0.7:7070")
    host = host.strip("[]") or "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"the host of {text!r} does not resolve ({error.strerror}); give its address") from None
    address = found[0][4]
    return str(address[0]), int(address[1])
