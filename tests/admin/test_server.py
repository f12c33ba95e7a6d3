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
from kvstore.core import MissReason, Tier
from kvstore.store import ObjectView, ReportLog
from kvstore.wire import ClientId, ReportItem
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


def report(request: str, reason: MissReason | None = None) -> ReportItem:
    return ReportItem(request, 700, 512, 256, reason, nvme_tokens=64)


async def reported() -> ReportLog:
    prefill, decode = ClientId(b"p" * 16), ClientId(b"d" * 16)
    ids = {"cmpl-7-0-ab": prefill, "cmpl-7-0-cd": decode, "cmpl-77-0-ef": decode, "a/b": decode}
    return ReportLog(
        100.0, [((client, name), (90.0, report(name, MissReason.BAD_COPY))) for name, client in ids.items()]
    )


@asynccontextmanager
async def serving(
    objects=listing, reports=reported, **changes: Any
) -> AsyncIterator[tuple[AdminServer, Any]]:
    """An AdminServer, and (path) -> (status, text) that leaves the loop free."""
    server = AdminServer(("127.0.0.1", 0), b"", a_view(**changes), objects, reports)
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
    monkeypatch.setattr(admin_server, "CONTROL_DEADLINE_S", 0.05)
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


async def test_a_request_is_found_by_the_id_of_its_response() -> None:
    """Mutant: any id that begins like it."""
    async with serving() as (_, get):
        status, text = await get("/v1/requests/cmpl-7")
        assert status == 200
        found = json.loads(text)["reports"]
        assert [each["request"] for each in found] == ["cmpl-7-0-ab", "cmpl-7-0-cd"]
        assert found[1] == {
            "request": "cmpl-7-0-cd",
            "client": "64" * 16,
            "age_s": 10.0,
            "queried": 700,
            "promised": 512,
            "pulled": 256,
            "missed": 444,
            "reason": "bad_copy",
            "from_nvme": 64,
        }
        assert (await get("/v1/requests/a%2Fb"))[0] == 200
        status, text = await get("/v1/requests/cmpl-8")
        assert status == 404 and "no engine has reported a request 'cmpl-8' here" in text
        assert (await get("/v1/requests"))[0] == 404


async def test_a_report_without_a_miss_has_no_reason() -> None:
    async def whole() -> ReportLog:
        item = ReportItem(request="r", queried_tokens=5, promised_tokens=5, pulled_tokens=5)
        return ReportLog(1.0, [((ClientId(b"c" * 16), "r"), (1.0, item))])

    async with serving(reports=whole) as (_, get):
        [found] = json.loads((await get("/v1/requests/r"))[1])["reports"]
        assert (found["missed"], found["reason"]) == (0, None)
