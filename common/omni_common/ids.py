"""Identifiers, made by the server. What must be unique is from the system's entropy, never a clock's or a client's."""

import os
import re
import secrets
import socket

_INCARNATION = re.compile(r"[0-9a-f]{16}")


def new_incarnation() -> str:
    """16 hex digits that tell this process from every other one, a restarted former self included."""
    return secrets.token_hex(8)


def is_incarnation(text: str) -> bool:
    """What a peer calls itself becomes part of paths, so it is looked at."""
    return _INCARNATION.fullmatch(text) is not None


def default_name(what: str) -> str:
    """How people tell this process from the others. With the host, for containers all have the same few pids."""
    return f"{what}-{socket.gethostname()}-{os.getpid()}"


def new_request_id() -> str:
    return secrets.token_hex(16)


def new_seed() -> int:
    """A seed for a request that brought none: 0 <= seed < 2**31, which every engine accepts."""
    return secrets.randbelow(2**31)
