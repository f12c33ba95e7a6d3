"""The process: configuration (read once), composition (the only place that knows all rooms), run."""

from kvstore.node.checks import in_words, is_loopback, read_token
from kvstore.node.config import Loaded, load_config
from kvstore.node.logs import start_logging
from kvstore.node.quiet import MOONCAKE_NOISE, without_noise
from kvstore.node.run import run
from kvstore.node.sections import SETTINGS, AuthSection, Config, LogSection
from kvstore.node.settings import ADDRESS, SECONDS, SIZE, Kind, Setting, split_address, without_password

__all__ = [
    "MOONCAKE_NOISE",
    "without_noise",
    "ADDRESS",
    "SECONDS",
    "SETTINGS",
    "SIZE",
    "AuthSection",
    "Config",
    "Kind",
    "Loaded",
    "LogSection",
    "Setting",
    "in_words",
    "is_loopback",
    "load_config",
    "read_token",
    "run",
    "split_address",
    "start_logging",
    "without_password",
]
