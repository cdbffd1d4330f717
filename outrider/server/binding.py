"""Taking the port: the first thing a server does, and so without anything that takes long to import."""

from __future__ import annotations

import socket

from outrider.errors import ConfigError

__all__ = ["BACKLOG", "bound"]

BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """Take the port, before anything heavy is done.

    Raises:
        ConfigError: It is taken, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)  # from now on probes are answered, if late, and a second server is refused
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} cannot be had ({error.strerror}); choose another with --port"
        ) from None
    return found
