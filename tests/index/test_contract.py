"""Every index keeps the contract: the plain twin, and Redis in all shapes."""

import pytest

from kvstore.index import Index, InProcessIndex
from tests.contracts.index import IndexContract, Lose
from tests.index.conftest import Connect


class TestInProcess(IndexContract):
    @pytest.fixture
    def index(self) -> InProcessIndex:
        return InProcessIndex()

    @pytest.fixture
    def peer(self, index: InProcessIndex) -> Index:
        return index

    @pytest.fixture
    def lose(self, index: InProcessIndex) -> Lose:
        async def lose() -> None:
            index.lose_everything()

        return lose


class OnRedis(IndexContract):
    """A subclass gives `url` and `flush`."""

    @pytest.fixture
    def index(self, connect: Connect, url: str) -> Index:
        return connect(url)

    @pytest.fixture
    def peer(self, connect: Connect, url: str) -> Index:
        return connect(url)

    @pytest.fixture
    def lose(self, servers) -> Lose:
        async def lose() -> None:
            servers.flush()

        return lose

    @pytest.fixture
    def url(self, servers) -> str:
        servers.flush()
        return str(servers.url)


class TestStandalone(OnRedis):
    @pytest.fixture
    def servers(self, redis_server):
        return redis_server


class TestUnixSocket(OnRedis):
    @pytest.fixture
    def servers(self, redis_server):
        return redis_server

    @pytest.fixture
    def url(self, servers) -> str:
        servers.flush()
        return str(servers.unix_url)


class TestCluster(OnRedis):
    @pytest.fixture
    def servers(self, redis_cluster):
        return redis_cluster


class TestSentinel(OnRedis):
    @pytest.fixture
    def servers(self, redis_sentinel):
        return redis_sentinel
