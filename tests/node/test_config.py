"""The configuration: three sources in their order, and refusals that say place, key and remedy."""

import tomllib
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.core import BadConfiguration
from kvstore.core.limits import GIB, MIB
from kvstore.node import SETTINGS, load_config
from kvstore.node.memory import default_arena_bytes, memory_bytes
from kvstore.node.settings import SIZE, without_password

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def toml(tmp_path: Path):
    """Writes a configuration file and gives its path."""

    def write(text: str) -> str:
        file = tmp_path / "kvstore.toml"
        file.write_text(text)
        return str(file)

    return write


def refusal(flags=None, environment=None, file="") -> str:
    with pytest.raises(BadConfiguration) as refused:
        load_config(flags or {}, environment or {}, file)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_flags_win_then_environment_then_file(toml) -> None:
    file = toml(
        '[log]\nlevel = "error"\n[dram]\nsize_bytes = "64MiB"\npage_bytes = "64KiB"\n[node]\nid = "f"\n'
    )
    environment = {"KVSTORE_DRAM_SIZE_BYTES": "128MiB", "KVSTORE_NODE_ID": "e"}
    config, origins = load_config({"node.id": "flag"}, environment, file)
    assert (config.log.level, config.dram.size_bytes, config.node.id) == ("error", 128 * MIB, "flag")
    assert config.dram.page_bytes == 64 << 10
    assert origins["log.level"] == f"{file}:2"
    assert origins["dram.size_bytes"] == "KVSTORE_DRAM_SIZE_BYTES"
    assert origins["node.id"] == "--node-id"
    assert origins["redis.url"] == "default"


def test_the_environment_may_name_the_file_and_a_flag_wins_over_it(toml, tmp_path) -> None:
    named = toml('[node]\nid = "by-environment"\n')
    other = tmp_path / "other.toml"
    other.write_text('[node]\nid = "by-flag"\n')
    environment = {"KVSTORE_CONFIG": named}
    assert load_config({}, environment).config.node.id == "by-environment"
    assert load_config({}, environment, str(other)).config.node.id == "by-flag"


def test_nothing_given_is_complete_and_on_loopback() -> None:
    config = load_config({}, {}).config
    assert config.control.listen == "127.0.0.1:7400"
    assert config.admin.listen == "127.0.0.1:7401"
    assert config.node.advertise == config.transfer.host == "127.0.0.1"
    assert config.node.id.endswith(":7400")
    assert config.dram.size_bytes >= 256 * MIB
    assert config.dram.size_bytes % config.dram.page_bytes == 0


def test_advertise_is_apart_from_listen() -> None:
    flags = {"control.listen": "0.0.0.0:7400", "node.advertise": "10.0.0.7", "auth.insecure": True}
    config = load_config(flags, {}).config
    assert config.control.listen == "0.0.0.0:7400"
    assert config.node.advertise == config.transfer.host == "10.0.0.7"
    assert load_config(flags | {"transfer.host": "10.1.0.7"}, {}).config.transfer.host == "10.1.0.7"


def test_sizes_are_read_as_people_write_them() -> None:
    read = {text: SIZE.parse(text) for text in ("1", "1B", "8GiB", "8 gib", "1.5MiB", "2MB", "1TiB")}
    assert list(read.values()) == [1, 1, 8 * GIB, 8 * GIB, 3 * MIB // 2, 2_000_000, 1 << 40]
    assert SIZE.parse(4096) == 4096
    for wrong in ("8 gigabytes", "GiB", "-1", "1e9", "", True, 1.5, None, [1]):
        with pytest.raises(ValueError):  # noqa: PT011  (the caller writes the text)
            SIZE.parse(wrong)


def test_an_arena_is_rounded_down_to_whole_pages() -> None:
    assert load_config({"dram.size_bytes": str(64 * MIB + 5)}, {}).config.dram.size_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            "[dram]\n\nsize_byte = 3\n",
            3,
            ["unknown key 'size_byte' in [dram]", "did you mean 'size_bytes'?", "huge_pages"],
        ),
        ("[node]\nid='a'\n[drm]\nx=1\n", 3, ["unknown section 'drm'", "did you mean 'dram'?", "redis"]),
        ("# hello\nlevel = 'info'\n", 2, ["unknown key outside of any section: 'level'", "known are: node"]),
        ("[log]\nfile=''\n[dram]\npage_bytes = true\n", 4, ["dram.page_bytes must be a size", "it is true"]),
        ("[dram]\nlock = 3\n", 2, ["dram.lock must be true or false", "it is 3"]),
        ("dram.size_bytes = 'much'\n", 1, ["dram.size_bytes must be a size", "'much'"]),
        ("[log]\nlevel = 'loud'\n", 2, ["log.level must be one of debug, info, warning, error", "'loud'"]),
        ("[redis]\nurl = 'http://x'\n", 2, ["redis.url", "redis+sentinel"]),
        ("[redis]\nurl = 3\n", 2, ["redis.url must be a text", "it is 3"]),
        (
            "[redis]\n\n\ntimeout_s = 0\n",
            4,
            ["redis.timeout_s must be a number of seconds above 0", "it is 0"],
        ),
        (
            "[control]\nlisten = 7400\n",
            2,
            ["control.listen must be an address", "127.0.0.1:7400", "it is 7400"],
        ),
        ("[control]\nlisten = 'x:99999'\n", 2, ["control.listen must be an address", "'x:99999'"]),
        ("[dram]\npage_bytes = 1000000\n", 2, ["not a power of two", "1MiB"]),
        ("[dram]\nsize_bytes = '1MiB'\n", 2, ["less than 16 pages"]),
        ("[dram]\nsize_bytes = '900TiB'\n", 2, ["does not fit", "GiB to give", "--dram-size-bytes"]),
        ("[transfer]\ndevices = 'mlx5_0'\n", 2, ["--transfer-protocol rdma"]),
        ("[control]\nlisten = '0.0.0.0:7400'\n", 2, ["from the network", "--auth-token-file", "--insecure"]),
        ("[admin]\nlisten = '10.0.0.1:7401'\n", 2, ["from the network", "--auth-token-file", "--insecure"]),
        ("[admin]\nlisten = '127.0.0.1:7400'\n", 2, ["is the control endpoint's address"]),
        (
            "[auth]\ninsecure = true\n[control]\nlisten = '[::]:7400'\n",
            0,
            ["node.advertise", "cannot connect to"],
        ),
        ("[node]\nadvertise = 'host:7400'\n", 2, ["without a port"]),
        ("[transfer]\nhost = 'host:15000'\n", 2, ["transfer.host", "without a port"]),
        ("[auth]\ntoken_file = '/nowhere/token'\n", 2, ["/nowhere/token cannot be read: No such file"]),
        ("[log]\nfile = '/nowhere/node.log'\n", 2, ["/nowhere does not exist", "log.file"]),
        ("[log]\nfile = '/tmp'\n", 2, ["/tmp is a directory"]),
        ("[log\n", 0, ["not valid TOML", "line 1"]),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_place_and_remedy(toml, text, line, says) -> None:
    file = toml(text)
    message = refusal(file=file)
    for part in says:
        assert part in message
    if line:
        assert message.startswith(f"{file}:{line}: "), message


def test_a_file_that_is_not_there_is_refused() -> None:
    assert (
        refusal(file="/nowhere.toml")
        == "/nowhere.toml: the configuration file cannot be read: No such file or directory"
    )


def test_a_variable_nobody_knows_is_refused_with_what_was_meant() -> None:
    message = refusal(environment={"KVSTORE_DRAM_SIZE": "8GiB"})
    assert message.startswith("KVSTORE_DRAM_SIZE: unknown variable; did you mean 'KVSTORE_DRAM_SIZE_BYTES'?")
    assert "KVSTORE_LOG_FILE" in message


def test_variables_that_kubernetes_adds_for_a_service_called_kvstore_are_not_ours() -> None:
    environment = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT_CONTROL": "7400",
        "KVSTORE_PORT": "tcp://10.0.0.1:7400",
        "KVSTORE_PORT_7400_TCP_ADDR": "10.0.0.1",
        "KVSTORE_NODE_SERVICE_PORT": "7400",
    }
    assert load_config({}, environment) == load_config({}, {})


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(TOKEN, 0o644, "chmod o-rw"), ("short", 0o600, "16 to 1024"), ("\n", 0o600, "holds 0 bytes")],
)
def test_a_token_that_protects_nothing_is_refused(tmp_path, content, mode, says) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    assert says in refusal({"auth.token_file": str(file)})


def test_with_a_token_the_network_is_allowed(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o640)
    flags = {"auth.token_file": str(file), "control.listen": "0.0.0.0:7400", "node.advertise": "h"}
    assert load_config(flags, {}).config.auth.token_file == str(file)


def test_the_default_arena_is_a_quarter_between_bounds() -> None:
    sizes = [default_arena_bytes(memory) for memory in (GIB // 2, 4 * GIB, 40 * GIB, 4096 * GIB)]
    assert sizes == [256 * MIB, GIB, 10 * GIB, 64 * GIB]


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "3000000"}, 3_000_000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/a/b/memory.max": "5000"}, 5_000),
        ("3:cpu,memory:/x\n0::/\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4000"}, 4_000),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max"}, 8_192_000),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "99999999999"}, 8_192_000),
    ],
)
def test_memory_is_the_smaller_of_available_and_cgroup(tmp_path, groups, limits, expected) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n",
        "proc/self/cgroup": groups,
        **limits,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_bytes(tmp_path) == expected


def test_names_are_derived_and_unique() -> None:
    assert len({setting.flag for setting in SETTINGS}) == len({s.variable for s in SETTINGS}) == len(SETTINGS)
    size = next(setting for setting in SETTINGS if setting.name == "dram.size_bytes")
    assert (size.flag, size.variable) == ("--dram-size-bytes", "KVSTORE_DRAM_SIZE_BYTES")


def test_printed_configuration_is_a_configuration_file_without_passwords(toml, capsys, tmp_path) -> None:
    file = toml('[redis]\nurl = "redis://:secret@10.0.0.5:6379/0"\n[dram]\nsize_bytes = "64MiB"\n')
    assert main(["config", "--config", file, "--no-dram-lock"]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert f'url = "redis://:***@10.0.0.5:6379/0"  # {file}:2' in printed
    assert "lock = false  # --dram-lock" in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert tomllib.loads(printed)["dram"]["size_bytes"] == 64 * MIB
    assert (
        load_config({}, {}, str(again)).config.dram == load_config({"dram.lock": False}, {}, file).config.dram
    )


def test_urls_are_shown_without_password() -> None:
    assert without_password("redis://me:pw@h:1/0") == "redis://me:***@h:1/0"
    assert without_password("redis+sentinel://:pw@h:1,h:2/s") == "redis+sentinel://:***@h:1,h:2/s"
    assert without_password("unix:///run/r.sock?password=pw&db=1") == "unix:///run/r.sock?password=***&db=1"
    assert without_password("redis://h:1/0") == "redis://h:1/0"
