"""Run a front for prefill and decode engines until SIGTERM or SIGINT."""

import argparse
from typing import Any, NamedTuple

from kvstore.core import BadConfiguration
from kvstore.node import (
    ADDRESS,
    SECONDS,
    SIZE,
    AuthSection,
    Kind,
    LogSection,
    is_loopback,
    read_token,
    split_address,
    start_logging,
)
from kvstore.proxy import ProxyConfig, engine_url
from kvstore.proxy import run as run_proxy


def _whole_number(raw: object) -> int:
    number = int(str(raw))
    if number < 1:
        raise ValueError
    return number


NUMBER = Kind("a whole number above 0", _whole_number)
LISTEN = "127.0.0.1:7480"
LEVELS = ("debug", "info", "warning", "error")


class Bound(NamedTuple):
    """A flag that becomes a field of the configuration."""

    flag: str
    field: str
    kind: Kind
    meaning: str


BOUNDS = (
    Bound("--in-flight-max", "in_flight_max", NUMBER, "Requests under way; more are refused with 429."),
    Bound("--body-bytes-max", "body_bytes_max", SIZE, "The largest request."),
    Bound("--attempts-max", "attempts_max", NUMBER, "Engines asked in vain before an error is passed on."),
    Bound("--connect-timeout-s", "connect_s", SECONDS, "To connect to an engine."),
    Bound("--prefill-timeout-s", "prefill_s", SECONDS, "For a prefill; then decode computes the prompt."),
    Bound("--first-token-timeout-s", "first_token_s", SECONDS, "From decode's start to its first token."),
    Bound("--stall-timeout-s", "stall_s", SECONDS, "Silence in a stream after which its engine is given up."),
    Bound("--request-timeout-s", "request_s", SECONDS, "For a whole request."),
    Bound("--health-interval-s", "health_interval_s", SECONDS, "Between health checks of an engine."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engines, where to listen, and bounds."""
    for role, meaning in {
        "prefill": "Engines that compute prompts, such as http://10.0.0.5:8000. None: decode does it all.",
        "decode": "Engines that answer.",
    }.items():
        parser.add_argument(
            f"--{role}",
            metavar="URL",
            nargs="+",
            action="extend",
            default=[],
            required=role == "decode",
            help=meaning,
        )
    parser.add_argument("--listen", metavar="ADDRESS", default=LISTEN, help=f"Default: {LISTEN}.")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help="Secret that clients must present (their API key). Needed off loopback.",
    )
    parser.add_argument(
        "--engine-token-file",
        metavar="FILE",
        default="",
        help="Secret that engines ask for (their --api-key).",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="Allow listening off loopback without a token."
    )
    for bound in BOUNDS:
        default = getattr(ProxyConfig, bound.field)
        parser.add_argument(
            bound.flag,
            metavar=bound.flag.rpartition("-")[2].upper(),
            default=str(default),
            help=f"{bound.meaning} Default: {default}.",
        )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="Default: info.")
    parser.add_argument("--log-file", metavar="FILE", default="", help="Default: standard error.")


def run(options: argparse.Namespace) -> int:
    """Runs the proxy; returns when it has stopped."""
    config = configuration(options)
    start_logging(LogSection(level=options.log_level, file=options.log_file))
    return run_proxy(config)


def configuration(options: argparse.Namespace) -> ProxyConfig:
    """What the flags say.

    Raises:
        BadConfiguration: one line about what is wrong.
    """
    address = _read("--listen", ADDRESS, options.listen)
    host, port = split_address(str(address))
    if not is_loopback(host) and not options.token_file and not options.insecure:
        raise BadConfiguration(
            f"--listen: {address} can be reached from the network and no token is asked for: add --token-file "
            "FILE, or --insecure if the network is trusted"
        )
    bounds: dict[str, Any] = {
        bound.field: _read(bound.flag, bound.kind, vars(options)[bound.flag[2:].replace("-", "_")])
        for bound in BOUNDS
    }
    return ProxyConfig(
        prefill=_engines("--prefill", options.prefill),
        decode=_engines("--decode", options.decode),
        listen=(host, port),
        token=_token("--token-file", options.token_file),
        engine_token=_token("--engine-token-file", options.engine_token_file),
        **bounds,
    )


def _engines(flag: str, urls: list[str]) -> tuple[str, ...]:
    """Each once; the same engine twice would count as two."""
    try:
        return tuple(dict.fromkeys(engine_url(url) for url in urls))
    except BadConfiguration as error:
        raise BadConfiguration(f"{flag}: {error}") from None


def _token(flag: str, path: str) -> bytes:
    return read_token(AuthSection(token_file=path), {"auth.token_file": flag})


def _read(flag: str, kind: Kind, text: str) -> object:
    try:
        return kind.parse(text)
    except ValueError:
        raise BadConfiguration(f"{flag}: expected {kind.expected}, not {text!r}") from None
