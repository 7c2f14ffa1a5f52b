"""Identifiers. All are made by the server from the system's entropy: never from a clock, never taken from a client."""

import secrets


def new_incarnation() -> str:
    """16 hex digits that tell this process from every other one, a restarted former self included."""
    return secrets.token_hex(8)


def new_request_id() -> str:
    return secrets.token_hex(16)


def new_seed() -> int:
    """A seed for a request that brought none: 0 <= seed < 2**31, which every engine accepts."""
    return secrets.randbelow(2**31)
