"""Which engine gets a request, and when one counts as up. No network: checks are told their results."""

import asyncio

import aiohttp
import pytest

from kvstore.proxy import ProxyConfig
from kvstore.proxy.engine import Engine, Engines, Role


@pytest.fixture
async def engines():
    async with aiohttp.ClientSession() as session:
        config = ProxyConfig(prefill=("http://p",), decode=("http://a", "http://b", "http://c"), pick_s=0.05)
        yield Engines(config, session)


def up(engines: Engines) -> list[Engine]:
    for engine in engines.all:
        engine.checked(True, 3)
    return engines.of(Role.DECODE)


async def test_an_engine_is_down_until_it_was_checked(engines) -> None:
    assert engines.pick(Role.DECODE) is None
    up(engines)
    assert engines.pick(Role.PREFILL).url == "http://p"


async def test_the_least_busy_and_then_the_one_that_waited_longest(engines) -> None:
    a, b, c = up(engines)
    assert [engines.pick(Role.DECODE) for _ in range(4)] == [a, b, c, a]
    with b.busy(), c.busy(), c.busy():
        assert engines.pick(Role.DECODE) is a
        with a.busy(), a.busy():
            assert engines.pick(Role.DECODE) is b
    assert engines.pick(Role.DECODE, without=[b]) is c


async def test_a_suspect_gets_nothing_until_a_check_has_cleared_it(engines) -> None:
    a, *_ = up(engines)
    a.suspect()
    assert a.check_now.is_set()
    assert a not in [engines.pick(Role.DECODE) for _ in range(3)]
    a.checked(True, 3)
    assert engines.pick(Role.DECODE) is a


async def test_checks_that_fail_in_a_row_make_it_down_and_others_do_not(engines) -> None:
    a, *_ = up(engines)
    for alive, is_up in [
        (False, True),
        (False, True),
        (True, True),
        (False, True),
        (False, True),
        (False, False),
    ]:
        a.checked(alive, 3)
        assert a.up is is_up


async def test_going_down_ends_every_wait_for_it(engines) -> None:
    """Mutant: waits end only by their own time."""
    a, *_ = up(engines)
    ended = []

    async def wait() -> None:
        try:
            async with a.patience(60):
                await asyncio.Event().wait()
        except TimeoutError:
            ended.append(True)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(wait())
        tasks.create_task(wait())
        await asyncio.sleep(0)
        a.checked(False, 1)
    assert ended == [True, True]
    assert a._waits == set()


async def test_one_that_was_tried_is_not_waited_for(engines) -> None:
    a, b, c = up(engines)
    assert await engines.pick_soon(Role.DECODE, [a, b, c]) is None
    for engine in (a, b):
        engine.suspect()
    assert await engines.pick_soon(Role.DECODE, [c]) is None  # waited, and neither came back
    assert await engines.pick_soon(Role.DECODE) is c
