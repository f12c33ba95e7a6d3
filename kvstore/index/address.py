"""Where Redis is, as the user writes it:

    redis://[user:password@]host[:port][/db]              rediss:// for TLS
    unix:///path/to/socket[?password=...&db=...]
    redis+sentinel://[user:password@]host:port,host:port/service[/db]    rediss+sentinel://
    redis+cluster://[user:password@]host:port,host:port                  rediss+cluster://

Options after `?`: ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs; sentinel_username and
sentinel_password where the Sentinels have credentials of their own.
"""

from typing import Final, Literal, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvstore.core import BadConfiguration

Kind = Literal["single", "unix", "sentinel", "cluster"]

_KINDS: Final[dict[str, Kind]] = {
    "redis": "single",
    "rediss": "single",
    "unix": "unix",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_OPTIONS: Final[dict[Kind, tuple[str, ...]]] = {
    "single": _TLS_OPTIONS,
    "unix": ("username", "password", "db"),
    "sentinel": (*_TLS_OPTIONS, "sentinel_username", "sentinel_password"),
    "cluster": _TLS_OPTIONS,
}


class RedisAddress(NamedTuple):
    """A parsed URL. `shown` is the URL without its secrets, for messages."""

    kind: Kind
    shown: str
    hosts: tuple[tuple[str, int], ...]
    tls: bool
    username: str | None
    password: str | None
    db: int
    service: str
    path: str
    options: dict[str, str]


def parse(url: str) -> RedisAddress:
    """Reads the URL of a Redis, a Sentinel group or a Cluster.

    Raises:
        BadConfiguration: it cannot be read; says what is wrong and shows a right one.
    """
    try:
        split = urlsplit(url)
    except ValueError as error:  # brackets that do not match, characters that no host has
        raise _wrong(url, "the host is none; IPv6 stands in brackets, as in redis://[::1]:6379/0") from error
    kind = _KINDS.get(split.scheme)
    if kind is None:
        raise _wrong(url, f"the scheme {split.scheme!r} is not known; known are {', '.join(_KINDS)}")
    options = dict(parse_qsl(split.query))
    unknown = sorted(set(options) - set(_OPTIONS[kind]))
    if unknown:
        raise _wrong(url, f"unknown option {unknown[0]!r}; known are {', '.join(_OPTIONS[kind])}")
    plain = sorted(set(options) & set(_TLS_OPTIONS)) if not split.scheme.startswith("rediss") else []
    if plain:
        raise _wrong(url, f"{plain[0]} is for TLS; write {split.scheme.replace('redis', 'rediss')}://")
    userinfo, _, places = split.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    service, db = _path(url, kind, split, options)
    default_port = 26379 if kind == "sentinel" else 6379
    hosts = () if kind == "unix" else tuple(_place(url, text, default_port) for text in places.split(","))
    if kind == "single" and len(hosts) > 1:
        raise _wrong(url, "several hosts need redis+sentinel:// or redis+cluster://")
    return RedisAddress(
        kind=kind,
        shown=f"{split.scheme}://{places}{split.path}",
        hosts=hosts,
        tls=split.scheme.startswith("rediss"),
        username=unquote(username) or options.pop("username", None),
        password=unquote(password) or options.pop("password", None),
        db=db,
        service=service,
        path=unquote(split.path) if kind == "unix" else "",
        options=options,
    )


def _path(url: str, kind: Kind, split: SplitResult, options: dict[str, str]) -> tuple[str, int]:
    """(Sentinel's service, database number) from the path, or for a Unix socket from the options."""
    words = [unquote(word) for word in split.path.split("/") if word]
    service = ""
    if kind == "sentinel":
        if not words:
            raise _wrong(url, "the service is missing; write redis+sentinel://host:port,host:port/service")
        service, *words = words
    elif kind == "unix":
        if not words:
            raise _wrong(url, "the path of the socket is missing; write unix:///path/to/redis.sock")
        words = [options.pop("db")] if "db" in options else []
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        raise _wrong(url, f"{'/'.join(words)!r} is not the number of a database")
    db = int(words[0]) if words else 0
    if kind == "cluster" and db:
        raise _wrong(url, "a Redis Cluster has database 0 only")
    return service, db


def _place(url: str, text: str, default_port: int) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise _wrong(url, f"{text!r} is not host:port") from error
    if not host:
        raise _wrong(url, "the host is missing; write for instance redis://127.0.0.1:6379/0")
    return host, default_port if port is None else port


def _wrong(url: str, why: str) -> BadConfiguration:
    head, at, tail = url.rpartition("@")
    shown = f"{head.partition('://')[0]}://...@{tail}" if at else url
    return BadConfiguration(f"redis.url {shown.partition('?')[0]}: {why}")
