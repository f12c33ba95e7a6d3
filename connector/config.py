"""The connector's settings: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, read once.

Every setting is declared here with its meaning and bounds; an unknown key is refused with the known ones.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.inspect import Metadata, StructType, type_info

from kvstore.client import ClientConfig
from kvstore.core import BadConfiguration, limits

__all__ = ["Config", "describe", "read_config", "read_token"]

Seconds = Annotated[float, Meta(ge=0, le=3_600)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user may set, complete: nothing is guessed later."""

    node: Annotated[
        str, Meta(description="control endpoint of a node, host:port; normally this host's own")
    ] = "127.0.0.1:7400"
    redis: Annotated[
        str,
        Meta(description="Redis of the fleet (the index); empty: what the node says, else only that node"),
    ] = ""
    token_file: Annotated[str, Meta(description="file with the secret that the nodes ask for")] = ""
    save: Annotated[bool, Meta(description="push what this engine computes")] = True
    write_back: Annotated[
        bool, Meta(description="push what this engine generates, too, so that the next turn finds it")
    ] = False
    layerwise: Annotated[
        bool,
        Meta(
            description="gather what is pushed layer by layer while a step computes; on GPU it costs full CUDA graphs"
        ),
    ] = False
    load: Annotated[bool, Meta(description="pull what the store holds")] = True
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=65_536,
            description="tokens of a chunk; the same everywhere, a multiple of the block size",
        ),
    ] = 256
    weights_version: Annotated[
        str, Meta(max_length=256, description="names the weights instead of the fingerprint of their files")
    ] = ""
    retention_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="models with windows or local attention: between its end and its beginning a prompt can be "
            "taken up again once in so many tokens (0: at its end only); less stores more",
        ),
    ] = 2_048
    min_tokens: Annotated[
        int, Meta(ge=0, description="a hit of fewer tokens beyond the local prefix cache is not loaded")
    ] = 64
    load_policy: Annotated[
        str,
        Meta(
            pattern="^(cost|always|never)$",
            description="what decides between loading a hit and computing it: measured cost, always load, never load",
        ),
    ] = "cost"
    request_timeout_s: Annotated[Seconds, Meta(description="how long one request to a node may take")] = 1.0
    lookup_timeout_s: Annotated[
        Seconds, Meta(description="how long a request may be held back to learn what is stored for it")
    ] = 1.0
    handoff_wait_s: Annotated[
        Annotated[float, Meta(ge=0, le=limits.WAIT_S_MAX)],
        Meta(description="how long a handed-off request may wait for commits under way"),
    ] = 10.0
    load_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=limits.LEASE_S_MAX)],
        Meta(description="how long a load may take before the rest of it is recomputed"),
    ] = 30.0
    save_timeout_s: Annotated[
        Annotated[float, Meta(gt=1, le=limits.RESERVATION_S_MAX)],
        Meta(description="how long a save may take before it is given up"),
    ] = 120.0
    pinned_share: Annotated[
        float, Meta(gt=0, le=1, description="share of the engine's KV blocks that saves under way may hold")
    ] = 0.5
    staging_bytes: Annotated[
        int, Meta(ge=limits.MIB, description="host memory per worker through which bytes pass")
    ] = 256 * limits.MIB
    transfer: Annotated[
        str,
        Meta(
            pattern="^(auto|mooncake|shm)$",
            description="how bytes move: mooncake; shm (nodes on this host only); auto: shm where a node gives its "
            "memory to this process, else mooncake",
        ),
    ] = "auto"
    protocol: Annotated[
        str, Meta(pattern="^(tcp|rdma)$", description="what Mooncake moves bytes with: tcp, rdma")
    ] = "tcp"
    devices: Annotated[str, Meta(description="RDMA devices, comma separated; empty: all")] = ""
    host: Annotated[
        str, Meta(description="address of this host that nodes can reach; empty: that on the way to `node`")
    ] = ""


def read_config(extra: dict[str, Any]) -> Config:
    """The settings in `kv_connector_extra_config`.

    Raises:
        BadConfiguration: an unknown key, or a value that cannot be; one line that says which and what would.
    """
    known = Config.__struct_fields__
    if unknown := sorted(set(extra) - set(known)):
        raise BadConfiguration(
            f"kv_connector_extra_config does not know {', '.join(unknown)}; it knows {', '.join(known)}"
        )
    try:
        config = msgspec.convert(extra, Config)
        ClientConfig(node=config.node, index_url=config.redis).check()
    except (msgspec.ValidationError, BadConfiguration) as error:
        raise BadConfiguration(f"kv_connector_extra_config: {error}") from error
    return config


def read_token(config: Config) -> bytes:
    """The secret in `token_file`, or nothing.

    Raises:
        BadConfiguration: the file cannot be read or is empty.
    """
    if not config.token_file:
        return b""
    try:
        with open(config.token_file, "rb") as file:
            token = file.read().strip()
    except OSError as error:
        raise BadConfiguration(f"token_file {config.token_file}: {error.strerror}") from error
    if not token:
        raise BadConfiguration(f"token_file {config.token_file} is empty")
    return token


def describe() -> list[tuple[str, str, Any]]:
    """(name, meaning, default) of every setting, for documentation and its test."""
    info = type_info(Config)
    assert isinstance(info, StructType)
    described = []
    for field in info.fields:
        schema = field.type.extra_json_schema if isinstance(field.type, Metadata) else None
        assert schema is not None, f"{field.name} does not say what it means"
        described.append((field.name, str(schema["description"]), field.default))
    return described
