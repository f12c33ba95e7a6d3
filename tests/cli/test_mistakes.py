"""A user's mistake costs one line on standard error and an exit code; never a traceback."""

import pytest

from kvstore.cli import main

TABLE = [
    (["serve", "--dram-size-bytes", "huge"], ["--dram-size-bytes", 'such as 8589934592 or "8GiB"', "'huge'"]),
    (["serve", "--dram-size-bytes", "800TiB"], ["does not fit", "set less than that"]),
    (["serve", "--dram-size-bytes", "1MiB"], ["less than 16 pages"]),
    (["serve", "--dram-size-bytes", "-5"], ["--dram-size-bytes", "'-5'"]),
    (["serve", "--dram-page-bytes", "3MiB"], ["not a power of two"]),
    (["serve", "--control-listen", "7400"], ["--control-listen", "127.0.0.1:7400"]),
    (["serve", "--control-listen", "0.0.0.0:7400"], ["--auth-token-file", "--insecure"]),
    (["serve", "--admin-listen", "0.0.0.0:7401"], ["--auth-token-file", "--insecure"]),
    (["serve", "--control-listen", "0.0.0.0:7400", "--insecure"], ["--node-advertise HOST"]),
    (["serve", "--admin-listen", "127.0.0.1:7400"], ["take another"]),
    (["serve", "--redis-timeout-s", "0"], ["a number of seconds above 0"]),
    (["serve", "--redis-timeout-s", "soon"], ["a number of seconds above 0", "'soon'"]),
    (["serve", "--redis-url", "http://10.0.0.5"], ["redis.url", "redis+sentinel"]),
    (["serve", "--transfer-protocol", "udp"], ["one of tcp, rdma", "'udp'"]),
    (["serve", "--transfer-devices", "mlx5_0"], ["--transfer-protocol rdma"]),
    (["serve", "--auth-token-file", "/nowhere"], ["/nowhere cannot be read"]),
    (["serve", "--auth-token-file", "/etc/passwd"], ["by everybody", "chmod"]),
    (["serve", "--log-level", "loud"], ["one of debug, info, warning, error"]),
    (["serve", "--log-file", "/nowhere/node.log"], ["/nowhere does not exist"]),
    (["serve", "--config", "/nowhere.toml"], ["/nowhere.toml", "cannot be read"]),
    (["serve", "--dram-size", "8GiB"], ["unknown argument --dram-size", "did you mean --dram-size-bytes?"]),
    (["serve", "--log-level"], ["--log-level", "kvstore serve --help"]),
    (["serve", "now"], ["unknown argument now"]),
    (["sreve"], ["sreve", "serve", "config", "version"]),
    ([], ["COMMAND", "kvstore --help"]),
]


@pytest.mark.parametrize(("arguments", "says"), TABLE, ids=lambda value: " ".join(value)[:50])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says, capsys) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvstore: ")
    assert captured.err.count("\n") == 1
    for part in says:
        assert part in captured.err


def test_a_misspelt_variable_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("KVSTORE_LOGLEVEL", "debug")
    assert main(["config"]) == 2
    assert "did you mean 'KVSTORE_LOG_LEVEL'?" in capsys.readouterr().err


def test_version_names_the_program_and_its_protocol(capsys) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == "kvstore 0.1.0 (control protocol 1)\n"


def test_help_says_every_flag(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--config FILE",
        "--dram-size-bytes SIZE",
        "--insecure",
        "--no-dram-lock",
        "--redis-url URL",
    ):
        assert flag in text
