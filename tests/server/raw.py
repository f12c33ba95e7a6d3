"""A peer that says what it likes: raw frames, for what no well-behaved client sends."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.stream import PREAMBLE
from kvstore.wire import ClientId, Reply, Request, RequestBody, decode_reply, encode
from tests.support import wait_until_async
from tests.support.frames import RawConnection


class RawPeer(RawConnection):
    """Sends frames; receives replies with a deadline, while the loop goes on."""

    def __init__(
        self, address: str, client: bytes = b"c" * 16, token: bytes = b"", preamble: bytes = PREAMBLE
    ) -> None:
        super().__init__(address, preamble)
        self.client = ClientId(client)
        self.token = token

    def request(self, body: RequestBody, request_id: int = 1, version: int = 1) -> None:
        self.send(encode(Request(version, self.client, request_id, body, self.token)))

    async def reply(self, deadline_s: float = 5.0) -> Reply:
        """The next reply."""
        frames: list[bytes] = []

        def came() -> bool:
            if (frame := self.receive()) is not None:
                frames.append(frame)
            return bool(frames)

        await wait_until_async(came, deadline_s, "a reply")
        return decode_reply(frames[0])

    async def ask(self, body: RequestBody, request_id: int = 1, version: int = 1) -> Reply:
        self.request(body, request_id, version)
        return await self.reply()

    async def end(self, deadline_s: float = 5.0) -> None:
        """Returns when the other side has ended the connection."""
        await wait_until_async(lambda: self.receive() is None and self.ended, deadline_s, "the end")


@contextmanager
def raw_peer(
    address: str, client: bytes = b"c" * 16, token: bytes = b"", preamble: bytes = PREAMBLE
) -> Iterator[RawPeer]:
    peer = RawPeer(address, client, token, preamble)
    try:
        yield peer
    finally:
        peer.close()
