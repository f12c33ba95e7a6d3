"""Every setting of a node, declared once. A size always means total bytes of the node."""

import dataclasses
from dataclasses import dataclass
from typing import cast, get_args

from kvstore.core import limits
from kvstore.node.settings import (
    ADDRESS,
    SECONDS,
    SIZE,
    SWITCH,
    TEXT,
    UIDS,
    Setting,
    choice,
    count,
    declared,
    setting,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSection:
    """Who this node is."""

    id: str = setting(
        TEXT,
        "",
        "Names the node in the index and in metrics; unique in the fleet, the same after a restart.",
        default_text="host name and control port",
    )
    advertise: str = setting(
        TEXT,
        "",
        "Host name or IP address under which engines on other hosts reach this node. Required when "
        "`control.listen` is a wildcard such as 0.0.0.0.",
        default_text="the host of `control.listen`",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSection:
    """The endpoint that engines talk to."""

    listen: str = setting(
        ADDRESS,
        "127.0.0.1:7400",
        "Where the control endpoint listens. Off loopback it needs `auth.token_file` (or `auth.insecure`).",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdminSection:
    """The HTTP endpoint for people, probes and Prometheus."""

    listen: str = setting(
        ADDRESS,
        "127.0.0.1:7401",
        "Where the admin HTTP endpoint listens. Off loopback it needs `auth.token_file` (or `auth.insecure`).",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DramSection:
    """The DRAM tier: one arena."""

    size_bytes: int = setting(
        SIZE,
        0,
        "Size of the arena: total bytes of the node, rounded down to whole pages.",
        default_text="a quarter of the available memory, 256 MiB to 64 GiB",
    )
    page_bytes: int = setting(
        SIZE,
        limits.PAGE_BYTES_DEFAULT,
        "Size of a page, a power of two; an object takes whole pages.",
        default_text="1 MiB",
    )
    huge_pages: bool = setting(SWITCH, True, "Use huge pages where the kernel allows them.")
    lock: bool = setting(
        SWITCH, True, "Lock the arena into memory (best effort: a warning says what is missing)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeSection:
    """A device of the NVMe tier; one table for each."""

    path: str = setting(
        TEXT,
        "",
        "Block device (a local NVMe namespace, or one of NVMe-oF attached by the kernel) or file. A file that is "
        "not there yet is made at the first start; a block device wants `kvstore format` first.",
        default_text="no NVMe tier",
    )
    size_bytes: int = setting(
        SIZE,
        0,
        "Size of the file when it is made. What is there already is used whole.",
        default_text="a file is not made",
    )
    threads: int = setting(
        count(2, limits.NVME_THREADS_MAX),
        limits.NVME_THREADS_DEFAULT,
        "Threads that read, and as many that write; 8 suit the latency of NVMe-oF.",
    )
    deadline_s: float = setting(
        SECONDS,
        limits.NVME_DEADLINE_S_DEFAULT,
        "An I/O that takes longer means that the device is down: its objects are misses until it is back.",
    )
    write_bytes_per_day: int = setting(
        SIZE,
        0,
        "Wear budget: what may be written to it in a day, evenly, with bursts of up to an hour's share.",
        default_text="no bound",
    )
    catalog_folder: str = setting(
        TEXT,
        "",
        "Folder for its catalog (LMDB), on a local file system. When it is lost it is made anew from the device.",
        default_text="`<path>.catalog` beside a file, `/var/lib/kvstore` for a block device",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersSection:
    """What moves between DRAM and NVMe, and when."""

    spill: str = setting(
        choice("evict", "eager", "never"),
        "evict",
        "When objects are written to NVMe: when DRAM needs their room, soon after their commit, or never (what is "
        "on NVMe is still read).",
    )
    promote_deadline_s: float = setting(
        SECONDS,
        limits.PROMOTE_DEADLINE_S_DEFAULT,
        "A read from NVMe that takes longer is given up: a miss.",
    )
    flush_s: float = setting(
        SECONDS,
        limits.FLUSH_S_DEFAULT,
        "How long a node that is told to stop may write what is only in DRAM to NVMe, the hottest first.",
    )
    scrub_bytes_per_s: int = setting(
        SIZE,
        0,
        "What each device is read with, behind all other work, to verify all objects on it again and again.",
        default_text="not while the node serves; see `kvstore scrub`",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisSection:
    """The index: where keys are."""

    url: str = setting(
        TEXT,
        "",
        "Redis of the fleet: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, for instance "
        "redis://10.0.0.5:6379/0. May hold a password: prefer the file or the environment to the flag.",
        default_text="an embedded Redis, private to this node",
    )
    timeout_s: float = setting(SECONDS, 1.0, "How long one call to Redis may take before it counts as down.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSection:
    """Bytes in motion, by Mooncake or by shared memory."""

    protocol: str = setting(choice("tcp", "rdma"), "tcp", "What Mooncake moves bytes with.")
    devices: str = setting(
        TEXT,
        "",
        "RDMA devices, comma separated, for instance mlx5_0,mlx5_1; refused with tcp.",
        default_text="any active one",
    )
    host: str = setting(
        TEXT,
        "",
        "Host name or IP address under which engines reach this node's arena, where that is another "
        "network than `node.advertise`.",
        default_text="`node.advertise`",
    )
    hold_s: float = setting(
        SECONDS,
        limits.HOLD_S,
        "How long pages that a writer left unfinished stay out of use. If late bytes (of a stopped peer, a healed "
        "network) came after that, they could damage another object: a miss, never wrong bytes.",
    )
    shm: bool = setting(
        SWITCH,
        True,
        "Let clients on this host that run as the same user copy from and to the arena's own memory.",
    )
    shm_dir: str = setting(
        TEXT,
        "",
        "Directory of the socket for that, made with mode 0700. Engines in other containers need it mounted at the "
        "same path.",
        default_text="`/run/kvstore`, else `/run/user/<uid>/kvstore`, else `/tmp/kvstore-<uid>`",
    )
    shm_uids: str = setting(
        UIDS,
        "",
        "Ids of other users, comma separated, whose processes on this host may do so too: they can read and change "
        "all of the arena.",
        default_text="nobody else",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthSection:
    """Who may talk to this node."""

    token_file: str = setting(
        TEXT,
        "",
        "File with the secret that engines and admin requests must present; not readable by everybody.",
        default_text="no token is asked for",
    )
    insecure: bool = setting(
        SWITCH, False, "Allow listening off loopback without a token.", flag="--insecure"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection:
    """What the node writes about itself."""

    level: str = setting(
        choice("debug", "info", "warning", "error"), "info", "The least important line written."
    )
    file: str = setting(TEXT, "", "File that log lines are appended to.", default_text="standard error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole configuration of a node, complete and checked: no field is left to be guessed later."""

    node: NodeSection = NodeSection()
    control: ControlSection = ControlSection()
    admin: AdminSection = AdminSection()
    dram: DramSection = DramSection()
    nvme: tuple[NvmeSection, ...] = ()
    tiers: TiersSection = TiersSection()
    redis: RedisSection = RedisSection()
    transfer: TransferSection = TransferSection()
    auth: AuthSection = AuthSection()
    log: LogSection = LogSection()


REPEATED = "nvme"
"""The section that is a list of tables in the file; flags and variables describe its only table."""
SECTIONS = {
    field.name: cast(type, next(iter(get_args(field.type)), field.type))
    for field in dataclasses.fields(Config)
}
SETTINGS: tuple[Setting, ...] = tuple(
    setting for section, section_type in SECTIONS.items() for setting in declared(section, section_type)
)


def tables_of(config: Config, section: str) -> tuple[object, ...]:
    """The tables of a section: one, or of the section that may be repeated as many as were given."""
    content = getattr(config, section)
    return content if isinstance(content, tuple) else (content,)
