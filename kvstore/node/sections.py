"""Every setting of a node, declared once. A size always means total bytes of the node."""

import dataclasses
from dataclasses import dataclass
from typing import cast

from kvstore.core import limits
from kvstore.node.settings import ADDRESS, SECONDS, SIZE, SWITCH, TEXT, Setting, choice, declared, setting


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
    """Bytes in motion, by Mooncake."""

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
    redis: RedisSection = RedisSection()
    transfer: TransferSection = TransferSection()
    auth: AuthSection = AuthSection()
    log: LogSection = LogSection()


SECTIONS = {field.name: cast(type, field.type) for field in dataclasses.fields(Config)}
SETTINGS: tuple[Setting, ...] = tuple(
    setting for section, section_type in SECTIONS.items() for setting in declared(section, section_type)
)
