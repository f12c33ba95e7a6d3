"""The connector's settings."""

import pytest

from connector.config import Config, describe, read_config, read_token
from kvstore.core import BadConfiguration


def test_defaults_are_enough() -> None:
    config = read_config({})
    assert (config.node, config.save, config.load, config.chunk_tokens) == ("127.0.0.1:7400", True, True, 256)


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadConfiguration) as error:
        read_config({"redis_url": "x", "Node": "y"})
    assert str(error.value).startswith(
        "kv_connector_extra_config does not know Node, redis_url; it knows node, redis,"
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_tokens", 0),
        ("chunk_tokens", "256"),
        ("save", 1),
        ("handoff_wait_s", 31),
        ("load_timeout_s", 0),
        ("load_timeout_s", 121),
        ("pinned_share", 1.5),
        ("protocol", "nvlink"),
        ("node", None),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(key, value) -> None:
    with pytest.raises(BadConfiguration, match=key):
        read_config({key: value})


@pytest.mark.parametrize(
    "node",
    [
        "",
        "localhost",
        "localhost:",
        "host:port",
        "host:0",
        "host:65536",
        "tcp://host:7400",
        "::1:7400",
        "a b:1",
    ],
)
def test_a_node_that_is_no_address_is_refused_at_start(node) -> None:
    """Mutant: it is found out later, in another thread, and the engine serves without the store."""
    with pytest.raises(BadConfiguration, match="is no address of a node; it looks like") as error:
        read_config({"node": node})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("node", ["127.0.0.1:7400", "[::1]:7400", "node-1.store_a.local:1"])
def test_addresses_of_nodes(node) -> None:
    assert read_config({"node": node, "redis": "redis://user:secret@[::1]:6379/1"}).node == node


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://host", "redis://", "redis://host:port", "redis://h/x"]
)
def test_a_redis_that_cannot_be_is_refused_at_start_without_its_secrets(url) -> None:
    with pytest.raises(BadConfiguration, match="redis"):
        read_config({"redis": url})
    with pytest.raises(BadConfiguration) as error:
        read_config({"redis": "redis://:secret@host/x"})
    assert "secret" not in str(error.value)


def test_whole_numbers_are_good_seconds() -> None:
    assert read_config({"load_timeout_s": 5}).load_timeout_s == 5


def test_every_setting_says_what_it_means() -> None:
    described = describe()
    assert [name for name, _, _ in described] == list(Config.__struct_fields__)
    assert all(meaning for _, meaning, _ in described)


def row(name: str, meaning: str, default: object) -> str:
    shown = (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:_}"
        if isinstance(default, int)
        else default
    )
    return f"| `{name}` | {f'`{shown}`' if shown != '' else 'empty'} | {meaning} |"


def test_the_documentation_lists_them_all(repository) -> None:
    page = (repository / "docs/CONNECTOR.md").read_text()
    section = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(*setting) for setting in describe()]


def test_the_token_comes_from_a_file(tmp_path) -> None:
    assert read_token(read_config({})) == b""
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert read_token(read_config({"token_file": str(file)})) == b"secret"
    file.write_text("\n")
    with pytest.raises(BadConfiguration, match="is empty"):
        read_token(read_config({"token_file": str(file)}))
    with pytest.raises(BadConfiguration, match="No such file"):
        read_token(read_config({"token_file": str(tmp_path / "none")}))
