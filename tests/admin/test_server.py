"""What the endpoint answers, from views and from the control loop."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from kvstore.admin import AdminServer, ObjectsPage
from kvstore.admin import server as admin_server
from kvstore.core import Tier
from kvstore.store import ObjectView
from tests.admin.views import a_view

OBJECTS = tuple(
    ObjectView(
        key=f"{number:064x}",
        namespace="0" * 64,
        depth=0,
        size_bytes=9,
        tiers={Tier.DRAM: "ready"},
        leases=0,
        cold=False,
    )
    for number in range(5)
)


async def listing(limit: int, cursor: int) -> ObjectsPage:
    following = cursor + limit
    return ObjectsPage(
        objects=OBJECTS[cursor:following], cursor=following if following < len(OBJECTS) else None
    )


@asynccontextmanager
async def serving(objects=listing, **changes: Any) -> AsyncIterator[tuple[AdminServer, Any]]:
    """An AdminServer, and (path) -> (status, text) that leaves the loop free."""
    server = AdminServer(("127.0.0.1", 0), b"", a_view(**changes), objects)
    host, port = server.start()
    server.ready(True)

    def ask(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(host, port, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.status, response.read().decode()
        connection.close()
        return content

    async def get(path: str) -> tuple[int, str]:
        return await asyncio.to_thread(ask, path)

    try:
        yield server, get
    finally:
        server.stop()


async def test_health_is_the_control_loop_turning() -> None:
    """Mutants: always "ok"; the age of the first view only."""
    async with serving(at_s=monotonic() - 60) as (server, get):
        status, text = await get("/healthz")
        assert status == 503
        assert "the control loop has been stuck for 60 s" in text
        assert (await get("/readyz"))[0] == 503
        server.publish(a_view())
        assert (await get("/healthz"))[0] == 200
        assert (await get("/readyz"))[0] == 200


async def test_a_node_that_stops_is_alive_and_not_ready() -> None:
    async with serving() as (server, get):
        server.ready(False)
        assert (await get("/healthz"))[0] == 200
        assert await get("/readyz") == (503, '{\n "error": "the node is starting or stopping"\n}\n')


async def test_stats_are_the_view_as_json() -> None:
    async with serving() as (_, get):
        status, text = await get("/v1/stats")
        stats = json.loads(text)
        assert status == 200
        assert stats["store"]["tiers"]["dram"]["pages"] == 64
        assert stats["refused"] == {"no_room": 3}
        assert stats["publisher"]["pending_keys"] == 4
        assert stats["pushed"]["seconds"]["total"] == pytest.approx(0.32)


async def test_objects_come_in_pages() -> None:
    async with serving() as (_, get):
        found: list[str] = []
        cursor: int | None = 0
        while cursor is not None:
            status, text = await get(f"/v1/objects?limit=2&cursor={cursor}")
            assert status == 200
            page = json.loads(text)
            assert len(page["objects"]) <= 2
            found += [shown["key"] for shown in page["objects"]]
            cursor = page["cursor"]
        assert found == [shown.key for shown in OBJECTS]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=many", "are numbers"),
        ("limit=0", "from 1 to 1000"),
        ("limit=1001", "from 1 to 1000"),
        ("cursor=-1", "cursor from 0"),
        ("after=3", "unknown parameter 'after'; known are limit, cursor"),
    ],
)
async def test_a_listing_that_cannot_be_is_refused(query, says) -> None:
    async with serving() as (_, get):
        status, text = await get(f"/v1/objects?{query}")
        assert status == 400
        assert says in json.loads(text)["error"]


async def test_a_control_loop_that_does_not_answer_costs_a_deadline(monkeypatch) -> None:
    monkeypatch.setattr(admin_server, "OBJECTS_DEADLINE_S", 0.05)
    cancelled = asyncio.Event()

    async def stuck(limit: int, cursor: int) -> ObjectsPage:
        try:
            return await asyncio.get_running_loop().create_future()  # never done
        finally:
            cancelled.set()

    async with serving(stuck) as (_, get):
        status, text = await get("/v1/objects")
        assert status == 503
        assert "did not answer" in text
        await asyncio.wait_for(cancelled.wait(), 5)
        assert (await get("/healthz"))[0] == 200
