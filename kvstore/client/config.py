"""What a client must be told. Plain data: reading files and environments is its owner's business."""

from dataclasses import dataclass, field
from secrets import token_bytes

from kvstore.client.address import is_address
from kvstore.core import BadConfiguration, limits
from kvstore.index import parse_url
from kvstore.wire import ClientId


def new_client_id() -> ClientId:
    """A fresh name for this process as a client."""
    return ClientId(token_bytes(limits.CLIENT_ID_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """The client's settings.

    Args:
        node: control endpoint of the local or preferred node, "host:port".
        index_url: Redis; empty: what the node says in its Welcome.
        token: the shared secret of the fleet; empty: none.
        request_timeout_s: deadline of one request to one node (waits that were asked for come on top).
        index_timeout_s: deadline of one question to the index.
        breaker_failures: unanswered requests in a row after which a node is no longer asked.
        probe_s, probe_s_max: wait before the first probe of such a node, and the longest.
        other_nodes_max: how many other nodes are asked when the index or the preferred node cannot help.
        whole_objects: what is leased is read whole, and a seal proves it; else nodes send the tables.
        client: names this process; the default is fresh and right.
    """

    node: str = "127.0.0.1:7400"
    index_url: str = ""
    token: bytes = field(default=b"", repr=False)
    request_timeout_s: float = 1.0
    index_timeout_s: float = 1.0
    breaker_failures: int = 3
    probe_s: float = 0.25
    probe_s_max: float = 10.0
    other_nodes_max: int = 2
    whole_objects: bool = True
    client: ClientId = field(default_factory=new_client_id)

    def check(self) -> None:
        """Looks at the addresses alone; nothing is resolved or connected.

        Raises:
            BadConfiguration: `node` or `index_url` cannot be read.
        """
        if not is_address(self.node):
            raise BadConfiguration(
                f"{self.node!r} is no address of a node; it looks like 10.0.0.1:7400 or [fd00::1]:7400"
            )
        if self.index_url:
            parse_url(self.index_url)
