"""The control endpoint of a node: authentication, limits, dispatch. Above the store; knows no transport of bytes."""

from kvstore.server.calls import Verifier
from kvstore.server.control import ControlServer
from kvstore.server.port import port_holder
from kvstore.server.stats import ServerStats

__all__ = ["ControlServer", "ServerStats", "Verifier", "port_holder"]
