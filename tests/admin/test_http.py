"""The HTTP shell: tokens, unknown paths, wrong methods and our own bugs are short JSON answers."""

import http.client
import json
import socket
from typing import Any

import pytest
from aiohttp import web

from kvstore.admin.http import HttpServer, Route, answer
from kvstore.core import KVStoreError

TOKEN = "0123456789abcdef"


async def hello(request: web.Request) -> web.Response:
    return answer({"hello": request.query.get("name", "")})


async def broken(request: web.Request) -> web.Response:
    raise ValueError("a secret detail")


ROUTES = (
    Route("/hello", "greets", hello),
    Route("/probe", "for probes", hello, open=True),
    Route("/broken", "fails", broken),
)


@pytest.fixture
def serve():
    """Starts servers and stops them again; gives (method, path, token) -> (status, content)."""
    servers = []

    def start(token: bytes = b""):
        server = HttpServer(("127.0.0.1", 0), token, ROUTES)
        servers.append(server)
        host, port = server.start()

        def ask(path: str, method: str = "GET", authorization: str = "") -> tuple[int, dict[str, Any]]:
            connection = http.client.HTTPConnection(host, port, timeout=10)
            connection.request(
                method, path, headers={"Authorization": authorization} if authorization else {}
            )
            response = connection.getresponse()
            content = json.loads(response.read())
            connection.close()
            return response.status, content

        return ask

    yield start
    for server in servers:
        server.stop()


def test_a_known_path_is_answered(serve) -> None:
    assert serve()("/hello?name=you") == (200, {"hello": "you"})


def test_an_unknown_path_lists_the_known_ones(serve) -> None:
    status, content = serve()("/metric")
    assert status == 404
    assert content["error"] == "no such path: /metric"
    assert content["routes"] == {"/hello": "greets", "/probe": "for probes", "/broken": "fails"}


def test_nothing_can_be_changed_from_here(serve) -> None:
    ask = serve()
    assert [ask("/hello", method)[0] for method in ("POST", "PUT", "DELETE")] == [405] * 3


def test_with_a_token_only_probes_are_open(serve) -> None:
    ask = serve(TOKEN.encode())
    assert ask("/probe")[0] == 200
    for wrong in ("", "Bearer", "Bearer 0123", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xff"):
        status, content = ask("/hello", authorization=wrong)
        assert status == 401, wrong
        assert "Authorization: Bearer" in content["error"]
    assert ask("/hello", authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_bug_of_ours_is_answered_and_logged_without_its_details(serve, caplog) -> None:
    ask = serve()
    status, content = ask("/broken")
    assert status == 500
    assert "secret" not in content["error"]
    assert "a secret detail" in caplog.text
    assert ask("/hello")[0] == 200


def test_a_taken_address_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = HttpServer(taken.getsockname(), b"", ROUTES)
        with pytest.raises(KVStoreError, match="cannot listen"):
            server.start()


def test_the_port_is_free_again_after_a_stop() -> None:
    first = HttpServer(("127.0.0.1", 0), b"", ROUTES)
    address = first.start()
    first.stop()
    second = HttpServer(address, b"", ROUTES)
    assert second.start() == address
    second.stop()
