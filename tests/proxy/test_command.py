"""`kvstore proxy` as a process, and its flags."""

import json
import re
import signal
import sys
import urllib.error
import urllib.request

import pytest

from kvstore.cli import main
from tests.support import Process, free_port, wait_until

DECODE = ["--decode", "http://127.0.0.1:8000"]
MISTAKES = [
    ([], ["--decode", "kvstore proxy --help"]),
    (["--decode"], ["--decode", "expected at least one argument"]),
    (["--decode", "10.0.0.5:8000"], ["--decode", "'10.0.0.5:8000'", "http://10.0.0.5:8000"]),
    ([*DECODE, "--prefill", "http://h:8000/x"], ["--prefill", "nothing but scheme, host and port"]),
    ([*DECODE, "--listen", "7480"], ["--listen", "'7480'"]),
    ([*DECODE, "--listen", "0.0.0.0:7480"], ["--token-file", "--insecure"]),
    ([*DECODE, "--token-file", "/nowhere"], ["--token-file", "/nowhere cannot be read"]),
    ([*DECODE, "--engine-token-file", "/etc/passwd"], ["--engine-token-file", "by everybody"]),
    ([*DECODE, "--attempts-max", "0"], ["--attempts-max", "a whole number above 0", "'0'"]),
    ([*DECODE, "--in-flight-max", "many"], ["--in-flight-max", "'many'"]),
    ([*DECODE, "--stall-timeout-s", "-1"], ["--stall-timeout-s", "a number of seconds above 0"]),
    ([*DECODE, "--body-bytes-max", "big"], ["--body-bytes-max", "8GiB"]),
    ([*DECODE, "--log-level", "loud"], ["--log-level", "loud"]),
    ([*DECODE, "--log-file", "/nowhere/proxy.log"], ["/nowhere/proxy.log"]),
    ([*DECODE, "--retries", "3"], ["unknown argument --retries"]),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda value: " ".join(value)[:40])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says, capsys) -> None:
    assert main(["proxy", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvstore: ")
    assert captured.err.count("\n") == 1
    for part in says:
        assert part in captured.err


def test_docs_list_every_flag(repository, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["proxy", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--api-key"}
    text = (repository / "docs/PROXY.md").read_text().partition("## Flags")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert flags == set(re.findall(r"--[a-z][a-z-]+", " ".join(row.split("|")[1] for row in rows)))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore", "proxy", *arguments]


@pytest.mark.process
def test_a_process_says_where_it_is_answers_and_stops_in_order(tmp_path) -> None:
    engine = f"http://127.0.0.1:{free_port()}"
    with Process(command("--decode", engine, "--listen", "127.0.0.1:0"), tmp_path / "log") as proxy:
        banner = proxy.wait_for_output("kvstore proxy is ready")
        assert f"decode   {engine} (down)" in banner
        assert "no --prefill" in banner
        match = re.search(r"OPENAI_BASE_URL=(http://\S+)/v1", banner)
        assert match
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(f"{match[1]}/healthz", timeout=10)
        with answer.value:
            assert (answer.value.code, json.load(answer.value)["decode_up"]) == (503, 0)
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.output()


@pytest.mark.process
def test_a_port_that_is_taken_is_one_line(tmp_path) -> None:
    where = ["--decode", "http://127.0.0.1:9", "--listen", f"127.0.0.1:{free_port()}"]
    with Process(command(*where), tmp_path / "first") as first:
        first.wait_for_output("kvstore proxy is ready")
        with Process(command(*where), tmp_path / "second") as second:
            assert wait_until(lambda: second.returncode is not None, 30)
            assert second.returncode == 1
            assert second.output().startswith("kvstore: cannot listen on 127.0.0.1:")
            assert second.output().count("\n") == 1
        first.send(signal.SIGINT)
        assert wait_until(lambda: first.returncode is not None)
        assert first.returncode == 0
