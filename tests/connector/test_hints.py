"""What a request says of its KV: it changes what goes first, and nothing else."""

from typing import Any

import pytest

from connector.hints import Hints, read_hints
from tests.connector.support import CHUNK, Engine, Node, prompt

TEXT = prompt(1, 2 * CHUNK)


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, Hints()),
        ("one_shot", Hints()),
        ({}, Hints()),
        ({"one_shot": True}, Hints(save_cold=True)),
        ({"one_shot": False, "consume_once": False}, Hints()),
        ({"consume_once": True}, Hints(release_cold=True)),
        ({"ttl_s": 600}, Hints(save_cold=True)),
        ({"ttl_s": 0.5}, Hints(save_cold=True)),
        ({"ttl_s": 601}, Hints()),
        ({"one_shot": None, "consume_once": None, "ttl_s": None, "live": None}, Hints()),
        ({"live": 0, "kvstore": {}, "do_remote_prefill": True}, Hints(live=0)),
    ],
)
def test_what_hints_mean(params: Any, hints: Hints) -> None:
    assert read_hints(params) == (hints, [])


@pytest.mark.parametrize(
    "params",
    [
        {"one_shot": "yes"},
        {"one_shot": 1},
        {"consume_once": []},
        {"ttl_s": "60"},
        {"ttl_s": True},
        {"ttl_s": 0},
        {"ttl_s": -1},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"live": -1},
        {"live": 1.5},
        {"live": True},
    ],
)
def test_what_means_nothing_is_ignored_with_one_line(params, caplog) -> None:
    [name] = params
    hints, [line] = read_hints(params)
    assert hints == Hints() and line.startswith(f"{name} is ")
    engine = Engine(Node())
    for request in "ab":
        engine.submit(request, TEXT, params=params)
    engine.run()
    said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(said) == 1 and said[0] == f"request a: {line}; ignored"
    engine.assert_nothing_left()


def stored_cold(params: Any) -> list[bool]:
    node = Node()
    Engine(node, write_back=True).generate("a", TEXT, max_tokens=CHUNK + 1, params=params)
    return [stored.cold for stored in node.objects.values()]


def test_what_is_saved_for_one_shot_is_cold() -> None:
    assert stored_cold(None) == [False] * 3
    assert stored_cold({"one_shot": True}) == stored_cold({"ttl_s": 60}) == [True] * 3


def test_what_one_request_consumed_is_cold_and_stays() -> None:
    node = Node()
    Engine(node).generate("a", TEXT)
    engine = Engine(node)
    engine.generate("b", TEXT)
    assert "release cold" not in node.calls
    engine = Engine(node)
    engine.generate("c", TEXT, params={"consume_once": True})
    assert engine.half.shared.stats.pulled_tokens == len(TEXT)
    assert node.calls.count("release cold") == 1
    assert len(node.objects) == 2, "nothing is removed"
    engine.assert_nothing_left()


def test_what_could_not_be_pulled_was_not_consumed() -> None:
    node = Node()
    Engine(node).generate("a", TEXT)
    engine = Engine(node)
    engine.worker.fail_load_at = 1
    engine.generate("c", TEXT, params={"consume_once": True})
    assert engine.half.shared.stats.loads_failed == 1
    assert "release cold" not in node.calls
    engine.assert_nothing_left()
