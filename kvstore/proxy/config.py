"""What a proxy is told: its engines, where it listens, and the bounds of everything it holds or waits for."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvstore.core import BadConfiguration
from kvstore.core.limits import MIB

EVENT_BYTES_MAX = 16 * MIB  # one event of a stream; the largest is the first, with the ids of the prompt
REPLY_BYTES_MAX = 64 * MIB  # an answer that is not streamed
READ_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class ProxyConfig:
    """All of it; times in seconds.

    `token` is what clients must bear, `engine_token` what engines ask for (`vllm serve --api-key`); each may be
    empty. `first_token_s` and `stall_s` are how long a stream may be silent before its first token and after it.
    """

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    listen: tuple[str, int] = ("127.0.0.1", 7480)
    token: bytes = b""
    engine_token: bytes = b""
    in_flight_max: int = 1024
    body_bytes_max: int = 64 * MIB
    attempts_max: int = 3  # engines asked in vain, one after the other, before the error is passed on
    connect_s: float = 5.0
    body_s: float = 30.0  # for a client to send its request
    prefill_s: float = 120.0
    first_token_s: float = 300.0
    stall_s: float = 60.0
    client_stall_s: float = 60.0  # how long a client may not take what it asked for
    request_s: float = 3600.0
    pick_s: float = 5.0  # how long to wait for an engine when all that may be asked are down
    health_interval_s: float = 2.0
    health_s: float = 5.0
    health_failures_max: int = 3


def engine_url(text: str) -> str:
    """The base URL of an engine, without a slash or `/v1` at its end.

    Raises:
        BadConfiguration: it is none.
    """
    url = text.rstrip("/").removesuffix("/v1")
    problem = f"{text!r} is not the URL of an engine, such as http://10.0.0.5:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadConfiguration(problem) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadConfiguration(problem)
    if parts.path or parts.query or parts.fragment or parts.username:
        raise BadConfiguration(f"{problem}: nothing but scheme, host and port")
    return url
