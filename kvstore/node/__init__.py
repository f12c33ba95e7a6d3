"""The process: configuration (read once), composition (the only place that knows all rooms), run."""

from kvstore.node.config import Loaded, load_config
from kvstore.node.run import run
from kvstore.node.sections import SETTINGS, Config
from kvstore.node.settings import Setting, without_password

__all__ = ["SETTINGS", "Config", "Loaded", "Setting", "load_config", "run", "without_password"]
