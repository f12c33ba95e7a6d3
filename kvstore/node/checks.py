"""What no single setting can know: values that contradict each other or this machine, and open defaults.

`settle` returns the configuration with every default filled in, or says in one line which setting
stands in the way and what to do.
"""

import dataclasses
import ipaddress
import os
import socket
import stat
from pathlib import Path

from kvstore.core import BadConfiguration
from kvstore.core.limits import KIB, MIB, TOKEN_BYTES_MAX
from kvstore.index import RedisIndex
from kvstore.node.device_checks import settle_devices
from kvstore.node.memory import default_arena_bytes, memory_bytes
from kvstore.node.refusing import Origins, refuse
from kvstore.node.sections import AuthSection, Config, DramSection
from kvstore.node.settings import split_address

PAGES_MIN = 16
PAGE_BYTES_MIN = 4 * KIB
PAGE_BYTES_MAX = 64 * MIB
TOKEN_BYTES_MIN = 16
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  (refused without an address to advertise)


def settle(config: Config, origins: Origins) -> Config:
    """The same configuration, checked and without open defaults.

    Raises:
        BadConfiguration: one line with cause and remedy.
    """
    _check_addresses(config, origins)
    _check_redis(config, origins)
    _check_transfer(config, origins)
    read_token(config.auth, origins)
    _check_log(config, origins)
    advertise = config.node.advertise or split_address(config.control.listen)[0]
    return dataclasses.replace(
        config,
        node=dataclasses.replace(
            config.node, id=config.node.id or default_name(config.control.listen), advertise=advertise
        ),
        dram=_settle_dram(config.dram, origins, memory_bytes()),
        nvme=settle_devices(config, origins),
        transfer=dataclasses.replace(config.transfer, host=config.transfer.host or advertise),
    )


def default_name(listen: str) -> str:
    """The name of a node that was given none, from where it listens."""
    _, port = split_address(listen)
    # A port that the kernel chooses names nobody, and two such nodes must not share an id.
    return f"{socket.gethostname()}:{port or f'pid-{os.getpid()}'}"


def read_token(auth: AuthSection, origins: Origins | None = None) -> bytes:
    """The shared secret; empty when none is asked for.

    Raises:
        BadConfiguration: the file cannot be read, everybody can read it, or it holds no usable secret.
    """
    if not auth.token_file:
        return b""
    path = Path(auth.token_file)
    where = f"{(origins or {}).get('auth.token_file', 'auth.token_file')}: token file {path}"
    try:
        token = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise BadConfiguration(f"{where} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadConfiguration(f"{where} can be read or written by everybody: chmod o-rw {path}")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise BadConfiguration(
            f"{where} holds {len(token)} bytes, {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} are needed: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_addresses(config: Config, origins: Origins) -> None:
    listens = {"control.listen": config.control.listen, "admin.listen": config.admin.listen}
    for name, address in listens.items():
        host, _ = split_address(address)
        if not is_loopback(host) and not config.auth.token_file and not config.auth.insecure:
            raise refuse(
                origins,
                name,
                f"{address} can be reached from the network and no token is asked for: set auth.token_file "
                "(--auth-token-file FILE), or --insecure if the network is trusted",
            )
    if config.control.listen == config.admin.listen and split_address(config.admin.listen)[1]:
        raise refuse(
            origins, "admin.listen", f"{config.admin.listen} is the control endpoint's address: take another"
        )
    host, _ = split_address(config.control.listen)
    if host in WILDCARDS and not config.node.advertise:
        raise refuse(
            origins,
            "node.advertise",
            f"control.listen is {config.control.listen}, which engines cannot connect to: set the host name or "
            "IP address that they use (--node-advertise HOST)",
        )
    for name, value in {
        "node.advertise": config.node.advertise,
        "transfer.host": config.transfer.host,
    }.items():
        if ":" in value and not _is_ip(value):
            raise refuse(origins, name, f"{value!r} must be a host only, without a port")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _check_redis(config: Config, origins: Origins) -> None:
    if config.redis.url:
        try:
            RedisIndex.connect(config.redis.url)  # reads the URL, connects to nothing yet
        except BadConfiguration as error:
            raise BadConfiguration(f"{origins.get('redis.url', 'redis.url')}: {error}") from error


def _check_transfer(config: Config, origins: Origins) -> None:
    if config.transfer.protocol != "rdma" and config.transfer.devices:
        raise refuse(
            origins,
            "transfer.devices",
            "devices are for rdma: add --transfer-protocol rdma, or leave them out",
        )


def _check_log(config: Config, origins: Origins) -> None:
    if not config.log.file:
        return
    path = Path(config.log.file)
    if path.is_dir():
        raise refuse(origins, "log.file", f"{path} is a directory: name a file in it")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        reason = "cannot be written by this user" if target.exists() else "does not exist"
        raise refuse(
            origins, "log.file", f"{target} {reason}: create it, or leave log.file out to log to stderr"
        )


def _settle_dram(dram: DramSection, origins: Origins, memory: int) -> DramSection:
    page = dram.page_bytes
    if not PAGE_BYTES_MIN <= page <= PAGE_BYTES_MAX or page & (page - 1):
        raise refuse(
            origins,
            "dram.page_bytes",
            f"{page} is not a power of two from {PAGE_BYTES_MIN} to {PAGE_BYTES_MAX}; 1MiB suits most models",
        )
    size = (
        dram.size_bytes
        if origins.get("dram.size_bytes", "default") != "default"
        else default_arena_bytes(memory)
    )
    if size < PAGES_MIN * page:
        raise refuse(
            origins,
            "dram.size_bytes",
            f"{size} bytes are less than {PAGES_MIN} pages of {page}: set at least {PAGES_MIN * page}",
        )
    if size > memory:
        raise refuse(
            origins,
            "dram.size_bytes",
            f"an arena of {in_words(size)} does not fit: this machine, or the cgroup of this process, has "
            f"{in_words(memory)} to give; set less than that (--dram-size-bytes)",
        )
    return dataclasses.replace(dram, size_bytes=size // page * page)


def in_words(size_bytes: int) -> str:
    """`8.0 GiB`, for people."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / MIB:.0f} MiB"
