"""Post JSON to a server within a time that nothing it does can lengthen, following it nowhere."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from attrs import frozen

LONGEST = 1 << 20
"""Bytes of an answer that are read; a longer one is no answer."""


@frozen
class Endpoint:
    """Name a place on a server."""

    secure: bool
    host: str
    port: int
    path: str


@frozen
class Answer:
    """Hold what a server said. headers: by their names in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def endpoint(url: str) -> Endpoint:
    """Return the place that an address names. ValueError for what is no address, or has a password in it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no address: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address of an API; give one such as https://host/v1, without name or query")
    secure = parts.scheme == "https"
    return Endpoint(secure, host, port or (443 if secure else 80), parts.path.rstrip("/"))


def post(place: Endpoint, body: bytes, headers: Mapping[str, str], seconds: float) -> Answer:
    """Send a body and return the answer, whatever its status. OSError where none came within so many seconds.

    Limits of a socket count from byte to byte; here the socket is cut when the time for all of them is over. Only the
    look-up of the host's name is in the hands of the system.
    """
    end = time.monotonic() + seconds
    sock = socket.create_connection((place.host, place.port), timeout=seconds)
    connection = http.client.HTTPConnection(place.host, place.port)
    with contextlib.ExitStack() as stack:
        if place.secure:
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=place.host, do_handshake_on_connect=False)
        connection.sock = sock
        stack.callback(connection.close)
        left = max(0.001, end - time.monotonic())
        sock.settimeout(left)
        cut = threading.Timer(left, _cut, [sock])
        cut.daemon = True
        cut.start()
        stack.callback(cut.cancel)
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.request("POST", place.path, body, dict(headers))
            response = connection.getresponse()
            said = response.read(LONGEST + 1)
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"no answer in HTTP: {type(error).__name__}") from None
        if time.monotonic() >= end:
            raise TimeoutError(f"no whole answer within {seconds:.3g} s")
        if len(said) > LONGEST:
            raise OSError(f"an answer of more than {LONGEST:,} bytes")
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, said)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
