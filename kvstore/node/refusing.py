"""How a setting is refused: where it was given, its name, what is wrong and what would be right."""

from collections.abc import Mapping

from kvstore.core import BadConfiguration

Origins = Mapping[str, str]
"""Per setting, where its value came from: "default" where it was not given."""


def refuse(origins: Origins, name: str, problem: str) -> BadConfiguration:
    """An error about a setting. One that was left at its default has no better place than its name."""
    origin = origins.get(name, "default")
    return BadConfiguration(f"{name}: {problem}" if origin == "default" else f"{origin}: {name}: {problem}")
