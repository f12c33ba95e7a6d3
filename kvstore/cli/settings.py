"""One flag per setting, and the configuration that results from them."""

import argparse

from kvstore.node import SETTINGS, Loaded, Setting, load_config


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and a flag for every setting."""
    parser.add_argument(
        "--config", metavar="FILE", default="", help="TOML file (else $KVSTORE_CONFIG names it)"
    )
    for setting in SETTINGS:
        default = setting.default_text or str(setting.default).lower()
        text = f"{setting.meaning} Default: {default}.".replace("`", "").replace("%", "%%")
        if isinstance(setting.default, bool):
            parser.add_argument(
                setting.flag,
                dest=setting.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            parser.add_argument(
                setting.flag,
                dest=setting.name,
                metavar=_metavar(setting),
                default=argparse.SUPPRESS,
                help=text,
            )


def load(options: argparse.Namespace) -> Loaded:
    """The configuration from these flags, the environment and the file.

    Raises:
        BadConfiguration: one line about what is wrong.
    """
    names = {setting.name for setting in SETTINGS}
    flags = {name: value for name, value in vars(options).items() if name in names}
    return load_config(flags, file=options.config)


def _metavar(setting: Setting) -> str:
    return setting.key.removesuffix("_bytes").removesuffix("_s").upper()
