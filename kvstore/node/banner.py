"""What `kvstore serve` says when it is ready: where everything is, what to mind, and what to paste into vLLM."""

import json
import shlex
from collections.abc import Iterable

from kvstore import __version__
from kvstore.node.checks import WILDCARDS, default_name, in_words, is_loopback
from kvstore.node.ports import resolves
from kvstore.node.sections import Config
from kvstore.node.settings import join_address, split_address, without_password
from kvstore.tiers import NvmeStats

READY = "kvstore is ready"


def banner(
    config: Config,
    *,
    control: str,
    admin: str,
    mooncake: str,
    shm: str,
    embedded_redis: str,
    devices: Iterable[NvmeStats],
    warnings: Iterable[str],
) -> str:
    """The text.

    Args:
        config: the node's configuration.
        control: the bound address of the control endpoint.
        admin: the bound address of the admin endpoint.
        mooncake: name of the arena's segment.
        shm: path of the arena's socket; empty: it is not shared.
        embedded_redis: URL of the embedded Redis, empty when the index is the fleet's.
        devices: of the NVMe tier.
        warnings: one line each.
    """
    if embedded_redis:
        index = f"{embedded_redis}: an embedded Redis, private to this node; a fleet shares one (--redis-url)"
    else:
        index = without_password(config.redis.url)
    advertised = join_address(config.node.advertise, split_address(control)[1])
    elsewhere = (
        "" if is_loopback(config.node.advertise) else ' (with "host", the address of the engine\'s own host)'
    )
    dram = config.dram
    facts: dict[str, str] = {
        "control": control if control == advertised else f"{control}, engines use {advertised}",
        "admin": f"http://{admin}  (/healthz /readyz /metrics /v1/stats /v1/objects)",
        "mooncake": f"{mooncake} ({config.transfer.protocol})",
        "shm": f"{shm}  (clients on this host, as the same user)"
        if shm
        else "not shared with clients on this host",
        "arena": f"{in_words(dram.size_bytes)}, {dram.size_bytes // dram.page_bytes} pages of {dram.page_bytes} B",
        "index": index,
    }
    return "\n".join(
        [
            f"kvstore {__version__}, node {config.node.id}",
            *(f"  {name:<9} {fact}" for name, fact in facts.items()),
            *(f"  {'nvme':<9} {_device(stats, config.tiers.spill)}" for stats in devices),
            *(f"  warning: {warning}" for warning in warnings),
            f"To use it from vLLM, add{elsewhere}:",
            f"  {vllm_flag(config, advertised)}",
            f"{READY}; SIGTERM or Ctrl-C stops it",
        ]
    )


def _device(stats: NvmeStats, spill: str) -> str:
    if not stats.up:
        return f"{stats.path}: not there yet, it is taken in when it is ({stats.reason})"
    size = in_words(stats.pages * stats.page_bytes)
    return f"{stats.path}, {size}, {stats.objects} objects found on it, spill = {spill}"


def vllm_flag(config: Config, control: str) -> str:
    """The flag that connects a vLLM instance to this node, ready to paste into a shell."""
    extra = {"node": control}
    if config.transfer.protocol != "tcp":
        extra["protocol"] = config.transfer.protocol
    if config.auth.token_file:
        extra["token_file"] = config.auth.token_file
    settings = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return f"--kv-transfer-config {shlex.quote(json.dumps(settings, separators=(',', ':')))}"


def warnings_of(config: Config, arena_warnings: Iterable[str]) -> list[str]:
    """What an operator should know about this configuration."""
    found = list(arena_warnings)
    found.append(
        "Mooncake listens on all interfaces without authentication: whoever reaches TCP ports 15000-17000 of this "
        "host can read and write the arena; fence them"
    )
    found.extend(
        f"{name} cannot be resolved here: engines that cannot either will not reach this node"
        for name in dict.fromkeys((config.node.advertise, config.transfer.host))
        if not resolves(name)
    )
    if config.nvme and config.node.id == default_name(config.control.listen):
        found.append(
            f"devices bear the name of their node; {config.node.id!r} follows from host name and port: give it one "
            "of its own (--node-id), else it finds its devices taken after these have changed"
        )
    host, _ = split_address(config.control.listen)
    if config.auth.insecure and not config.auth.token_file and not is_loopback(host):
        found.append("control has no token (--insecure): whoever reaches it can use and drop everything")
    if host not in WILDCARDS and is_loopback(host) and not is_loopback(config.node.advertise):
        found.append(f"engines are told {config.node.advertise}, but control listens on loopback only")
    return found
