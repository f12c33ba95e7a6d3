"""A network between this host and a node, which can lose packets without a word. Needs root and `ip` (iproute2)."""

import subprocess
from collections.abc import Sequence
from typing import Self

HOST, NODE = "10.203.77.1", "10.203.77.2"
NOWHERE = "02:00:00:00:00:99"  # nobody's: a frame to it is dropped by whoever gets it


class Network:
    """A network namespace at the end of a cable. `within` are the words that run a command in it."""

    name = "kvstore-e2e"
    within: Sequence[str] = ("ip", "netns", "exec", name)

    def lose(self) -> None:
        """From now on nothing arrives, in either direction, and nobody is told."""
        _ip(f"neigh replace {NODE} lladdr {NOWHERE} nud permanent dev kvhost")
        _ip(f"-n {self.name} neigh replace {HOST} lladdr {NOWHERE} nud permanent dev kvnode")

    def heal(self) -> None:
        """Packets arrive again."""
        _ip(f"neigh replace {NODE} lladdr 02:00:00:00:00:02 nud permanent dev kvhost")
        _ip(f"-n {self.name} neigh replace {HOST} lladdr 02:00:00:00:00:01 nud permanent dev kvnode")

    def __enter__(self) -> Self:
        _ip(f"netns add {self.name}")
        _ip(f"link add kvhost address 02:00:00:00:00:01 type veth peer name kvnode netns {self.name}")
        _ip(f"-n {self.name} link set kvnode address 02:00:00:00:00:02")
        _ip(f"addr add {HOST}/24 dev kvhost")
        _ip(f"-n {self.name} addr add {NODE}/24 dev kvnode")
        _ip("link set kvhost up")
        _ip(f"-n {self.name} link set kvnode up")
        _ip(f"-n {self.name} link set lo up")
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        _ip(f"netns del {self.name}")  # the cable goes with it


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
