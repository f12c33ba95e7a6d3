"""What the banner says of configurations that a single process test does not have."""

import json
import shlex

from kvstore.node import load_config
from kvstore.node.banner import banner, vllm_flag, warnings_of

FLEET = {
    "node.id": "n1",
    "node.advertise": "10.0.0.7",
    "control.listen": "0.0.0.0:7400",
    "auth.insecure": True,
    "redis.url": "redis://:secret@10.0.0.5:6379/0",
}


def config_of(**changes: object):
    return load_config({**FLEET, **changes}, {}).config


def test_engines_are_told_the_advertised_address() -> None:
    text = banner(
        config_of(),
        control="0.0.0.0:7400",
        admin="127.0.0.1:7401",
        mooncake="10.0.0.7:15001",
        shm="/run/kvstore/b0.sock",
        embedded_redis="",
        devices=[],
        warnings=["mind this"],
    )
    assert "  control   0.0.0.0:7400, engines use 10.0.0.7:7400" in text
    assert "  index     redis://:***@10.0.0.5:6379/0\n" in text
    assert "  warning: mind this\n" in text
    assert '(with "host", the address of the engine\'s own host)' in text
    assert '"node":"10.0.0.7:7400"' in text
    assert "secret" not in text


def test_the_flag_carries_what_an_engine_cannot_guess() -> None:
    _, value = shlex.split(vllm_flag(config_of(**{"transfer.protocol": "rdma"}), "10.0.0.7:7400"))
    assert json.loads(value)["kv_connector_extra_config"] == {"node": "10.0.0.7:7400", "protocol": "rdma"}


def test_what_is_dangerous_or_cannot_work_is_warned_of() -> None:
    mooncake, insecure = warnings_of(config_of(), ())
    assert "15000-17000" in mooncake
    assert "--insecure" in insecure
    found = warnings_of(
        config_of(**{"control.listen": "127.0.0.1:7400", "transfer.host": "no-such-host.invalid"}),
        ["not locked"],
    )
    assert found[0] == "not locked"
    assert any("no-such-host.invalid cannot be resolved here" in warning for warning in found)
    assert any("told 10.0.0.7, but control listens on loopback only" in warning for warning in found)
