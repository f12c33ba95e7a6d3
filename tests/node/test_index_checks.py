"""A node does not start with a Redis that will never do; one that is not there yet is no reason to wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstore.core import BadConfiguration
from kvstore.index import RedisIndex
from kvstore.node.index_checks import refuse_wrong_redis
from tests.support import RedisServer, free_port

WEB_SERVER = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
OLD = b"# Server\r\nredis_version:6.0.16\r\n"
OLD_REDIS = b"$%d\r\n%b\r\n" % (len(OLD), OLD)


@asynccontextmanager
async def server_that_says(reply: bytes) -> AsyncIterator[str]:
    """Whatever it is asked; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(4096):
            # redis-py introduces itself first (CLIENT SETINFO), each of these wants an answer.
            writer.write(b"+OK\r\n" * request.count(b"SETINFO") if b"SETINFO" in request else reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


async def judge(url: str) -> None:
    index = RedisIndex.connect(url, 1.0)
    try:
        await refuse_wrong_redis(index, url)
    finally:
        await index.close()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (WEB_SERVER, ["something else listens there; check host and port in redis.url"]),
        (OLD_REDIS, ["has version 6.0.16, 6.2 or later is needed", "upgrade it"]),
    ],
    ids=["no Redis", "an old one"],
)
async def test_who_answers_and_is_not_the_right_one_is_refused(reply, says) -> None:
    async with server_that_says(reply) as url:
        with pytest.raises(BadConfiguration, match=r"^redis\.url: Redis at redis://127") as caught:
            await judge(url)
    for part in says:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_wrong_password_is_refused_and_the_right_one_is_not(tmp_path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        await judge(server.url)
        client.config_set("requirepass", "secret")
        for wrong in (server.url, server.url.replace("://", "://:guess@")):
            with pytest.raises(BadConfiguration, match=r"check user and password in redis\.url") as caught:
                await judge(wrong)
            assert "guess" not in str(caught.value)
        await judge(server.url.replace("://", "://:secret@"))


async def test_a_user_who_may_not_ask_for_the_version_may_be_right(tmp_path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        client.execute_command("ACL SETUSER kv on >pw ~kv:* +@read +@write +@scripting")
        await judge(server.url.replace("://", "://kv:pw@"))


async def test_one_that_does_not_answer_is_waited_for_while_the_node_serves() -> None:
    await judge(f"redis://127.0.0.1:{free_port()}/0")
