"""A store that always misses. What is safe only because nothing is ever hit must not pass for safe: every suite of
safety has to fail with it (tests/faults/test_always_miss.py).

`pytest -p tests.support.always_miss` gives it to every test: to the stores of its process, to the nodes that it
starts, and to what the connector's tests put in place of a node. All else is real: whoever acquires keys is answered
for keys that nobody has stored.
"""

import sys
from collections.abc import Sequence

import msgspec

from deploy.demo import node as demo
from kvstore.cli import main
from kvstore.core import Key
from kvstore.store import Store
from kvstore.wire import Acquire, ClientId, SentAnswer
from tests.support import node

PROGRAM = (sys.executable, "-m", "tests.support.always_miss")


def never_hit() -> None:
    """From now on no store of this process hits."""
    really = Store.acquire

    def acquire(self: Store, client: ClientId, request: Acquire) -> tuple[SentAnswer, ...]:
        strange = tuple(Key(bytes(byte ^ 0xFF for byte in key)) for key in request.keys)
        return really(self, client, msgspec.structs.replace(request, keys=strange))

    Store.acquire = acquire  # type: ignore[method-assign]


def nothing(self: object, keys: Sequence[Key]) -> int:
    """The length of the prefix that is stored."""
    return 0


def pytest_configure() -> None:
    """As a plugin."""
    from tests.connector.support import FakeControl  # noqa: PLC0415 - imports vLLM, which a node does without

    never_hit()
    node.PROGRAM = demo.PROGRAM = PROGRAM
    FakeControl._prefix = nothing  # type: ignore[method-assign]


if __name__ == "__main__":
    never_hit()
    sys.exit(main())
