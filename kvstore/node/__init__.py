"""The process: configuration (read once), composition (the only place that knows all rooms), run."""

from kvstore.node.checks import in_words, is_loopback, read_token
from kvstore.node.config import Loaded, load_config, name_in
from kvstore.node.device_checks import catalog_folder
from kvstore.node.devices import device_config
from kvstore.node.logs import start_logging
from kvstore.node.quiet import MOONCAKE_NOISE, without_noise
from kvstore.node.run import run
from kvstore.node.sections import REPEATED, SETTINGS, AuthSection, Config, LogSection, NvmeSection, tables_of
from kvstore.node.settings import ADDRESS, SECONDS, SIZE, Kind, Setting, split_address, without_password
from kvstore.node.survey import Finding, State, survey_machine

__all__ = [
    "MOONCAKE_NOISE",
    "without_noise",
    "ADDRESS",
    "REPEATED",
    "SECONDS",
    "SETTINGS",
    "SIZE",
    "AuthSection",
    "Config",
    "Finding",
    "Kind",
    "Loaded",
    "NvmeSection",
    "LogSection",
    "Setting",
    "State",
    "catalog_folder",
    "device_config",
    "in_words",
    "is_loopback",
    "load_config",
    "name_in",
    "read_token",
    "run",
    "split_address",
    "start_logging",
    "survey_machine",
    "tables_of",
    "without_password",
]
