"""What stands in a node's way on this machine, before it runs: devices, links, memory, Redis, ports, Mooncake."""

from kvstore.node.survey.finding import Finding, State
from kvstore.node.survey.machine import survey_machine

__all__ = ["Finding", "State", "survey_machine"]
