"""A peer that says what it likes: raw frames over a DEALER, for what no well-behaved client sends."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from kvstore.wire import ClientId, Reply, Request, RequestBody, decode_reply, encode
from tests.support import wait_until_async


class RawPeer:
    """Sends frames; receives replies with a deadline, while the loop goes on."""

    def __init__(self, address: str, client: bytes = b"c" * 16, token: bytes = b"") -> None:
        self.client = ClientId(client)
        self.token = token
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
        self.socket.connect(f"tcp://{address}")

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def request(self, body: RequestBody, request_id: int = 1, version: int = 1) -> None:
        self.send(encode(Request(version, self.client, request_id, body, self.token)))

    async def reply(self, deadline_s: float = 5.0) -> Reply:
        """The next reply."""
        await wait_until_async(lambda: self.socket.poll(0), deadline_s, "a reply")
        return decode_reply(self.socket.recv())

    async def ask(self, body: RequestBody, request_id: int = 1, version: int = 1) -> Reply:
        self.request(body, request_id, version)
        return await self.reply()


@contextmanager
def raw_peer(address: str, client: bytes = b"c" * 16, token: bytes = b"") -> Iterator[RawPeer]:
    peer = RawPeer(address, client, token)
    try:
        yield peer
    finally:
        peer.socket.close()
