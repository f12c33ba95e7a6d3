"""Redis and ports."""

import re
import subprocess

from kvstore.core import KVStoreError
from kvstore.index import RedisIndex
from kvstore.node.checks import is_loopback
from kvstore.node.embedded_redis import find_binary
from kvstore.node.index_checks import too_old
from kvstore.node.ports import claimable
from kvstore.node.sections import Config
from kvstore.node.settings import split_address, without_password
from kvstore.node.survey.finding import Finding, fail, ok, warn

_EMBEDDED_S = 10.0


async def survey_redis(config: Config) -> Finding:
    """Whether the index can be reached, or embedded."""
    if not config.redis.url:
        return _survey_embedded()
    subject = f"redis {without_password(config.redis.url)}"
    index = RedisIndex.connect(config.redis.url, config.redis.timeout_s)
    try:
        return _judge(subject, await index.version())
    except KVStoreError as error:
        text, _, remedy = str(error).rpartition("; ")
        return fail(subject, text, remedy)
    finally:
        await index.close()


def survey_ports(config: Config) -> list[Finding]:
    """Whether our own ports are free, and who may reach Mooncake's."""
    flags = {"--control-listen": config.control.listen, "--admin-listen": config.admin.listen}
    found = [_survey_port(flag, address) for flag, address in flags.items()]
    if not is_loopback(config.node.advertise):
        found.append(
            warn(
                "ports of mooncake",
                "it listens on all interfaces without authentication: whoever reaches it can use the arena",
                "let only engines and nodes reach TCP 15000-17000 (firewall, network policy)",
            )
        )
    return found


def _survey_embedded() -> Finding:
    subject = "redis, embedded"
    try:
        binary = find_binary()
        said = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_EMBEDDED_S, check=True
        ).stdout
    except KVStoreError as error:
        text, _, remedy = str(error).partition(": ")
        return fail(subject, text, remedy)
    except (OSError, subprocess.SubprocessError) as error:
        return fail(subject, f"it does not run: {error}", "set redis.url to a Redis of yours")
    version = re.search(r"v=([\d.]+)", said)
    return _judge(f"{subject} ({binary})", version[1] if version else said.strip())


def _judge(subject: str, version: str) -> Finding:
    if too_old(version):
        return fail(
            subject, f"version {version}: 6.2 or later is needed", "upgrade it, or set another redis.url"
        )
    return ok(subject, f"version {version}")


def _survey_port(flag: str, address: str) -> Finding:
    subject = f"port {address}"
    try:
        claimable(address, flag)
    except KVStoreError as error:
        text, _, remedy = str(error).rpartition(": ")
        if "kvstore serve" in text or "kvstore check" in text:
            return warn(subject, f"{text}: a node runs already", f"another node needs another port: {flag}")
        return fail(subject, text, remedy)
    return ok(subject, "any free one" if not split_address(address)[1] else "free")
