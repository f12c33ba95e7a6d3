"""Configuration: read once, from a TOML file, `KVSTORE_*` variables and flags, into one frozen `Config`.

Flags win over the environment, the environment over the file, the file over the defaults. Whatever is
not known here is refused, with the known names; nothing is dropped in silence. This is the only file
that reads the environment.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core import BadConfiguration
from kvstore.node.checks import settle
from kvstore.node.sections import REPEATED, SECTIONS, SETTINGS, Config
from kvstore.node.settings import Setting, Value

CONFIG_VARIABLE = "KVSTORE_CONFIG"

# A Kubernetes service called "kvstore" or "kvstore-..." puts these into every pod; they are not ours.
_KUBERNETES = re.compile(r"KVSTORE(_\w+)?_(SERVICE_HOST|(SERVICE_)?PORT(_\w+)?)")


class Loaded(NamedTuple):
    """A configuration and, per setting, where its value came from ("default" where it was not given)."""

    config: Config
    origins: dict[str, str]


class _Given(NamedTuple):
    """A value as it was given, and where."""

    raw: object
    origin: str


def load_config(
    flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None, file: str = ""
) -> Loaded:
    """Reads, merges and checks the configuration.

    Args:
        flags: setting name (`dram.size_bytes`) to the flag's value, given ones only.
        environment: instead of the process's own.
        file: path of the TOML file; else `KVSTORE_CONFIG` names it, else there is none.

    Raises:
        BadConfiguration: one line with the place, the key, what is wrong and what would be right.
    """
    environment = os.environ if environment is None else environment
    path = file or environment.get(CONFIG_VARIABLE, "")
    given = _from_file(path) if path else {}
    given |= _from_environment(environment)
    given |= {name: _Given(raw, _setting(name).flag) for name, raw in (flags or {}).items()}
    _refuse_ambiguous(given)
    values: dict[str, dict[str, Value]] = {section: {} for section in SECTIONS if section != REPEATED}
    for name, (raw, origin) in given.items():
        table, _, key = name.rpartition(".")
        values.setdefault(table, {})[key] = _parsed(_setting(name), raw, origin)
    sections: dict[str, Any] = {
        table: SECTIONS[table](**values.pop(table)) for table in SECTIONS if table != REPEATED
    }
    sections[REPEATED] = tuple(SECTIONS[REPEATED](**table) for table in values.values())
    config = Config(**sections)
    origins = {setting.name: "default" for setting in SETTINGS}
    origins |= {name: origin for name, (_, origin) in given.items()}
    return Loaded(settle(config, origins), origins)


def name_in(table: int, name: str) -> str:
    """The name of a setting of the section that may be repeated: `nvme.path`, then `nvme[1].path`, ..."""
    section, _, key = name.partition(".")
    return f"{section}[{table}].{key}" if table else name


def _setting(name: str) -> Setting:
    plain = re.sub(r"\[\d+\]", "", name)
    return next(setting for setting in SETTINGS if setting.name == plain)


def _refuse_ambiguous(given: Mapping[str, _Given]) -> None:
    """Flags and variables describe one device: which of several would they mean?"""
    if not any(name.startswith(f"{REPEATED}[") for name in given):
        return
    for name, (_, origin) in given.items():
        setting = _setting(name)
        if setting.section == REPEATED and origin in (setting.flag, setting.variable):
            raise BadConfiguration(
                f"{origin}: the file has several [[{REPEATED}]] tables, so it is not clear which of them is meant: "
                "change the file instead"
            )


def _parsed(setting: Setting, raw: object, origin: str) -> Value:
    try:
        return setting.kind.parse(raw)
    except ValueError:
        shown = raw if isinstance(raw, str) else str(raw).lower() if isinstance(raw, bool) else repr(raw)
        raise BadConfiguration(
            f"{origin}: {setting.name} must be {setting.kind.expected}; it is {shown!r}"
            if isinstance(raw, str)
            else f"{origin}: {setting.name} must be {setting.kind.expected}; it is {shown}"
        ) from None


# --- sources ----------------------------------------------------------------------------------------


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    known = {setting.variable: setting.name for setting in SETTINGS}
    given = {}
    for variable, raw in environment.items():
        if variable in known:
            given[known[variable]] = _Given(raw, variable)
        elif (
            variable.startswith("KVSTORE_")
            and variable != CONFIG_VARIABLE
            and not _KUBERNETES.fullmatch(variable)
        ):
            known_names = [CONFIG_VARIABLE, *known]
            raise BadConfiguration(f"{variable}: unknown variable; {_hint(variable, known_names)}")
    return given


def _from_file(path: str) -> dict[str, _Given]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise BadConfiguration(f"{path}: the configuration file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadConfiguration(f"{path}: the configuration file is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfiguration(f"{path}: not valid TOML: {error}") from None
    given: dict[str, _Given] = {}
    for section, content in tree.items():
        place = f"{path}:{_line(text, section)}"
        if section not in SECTIONS or not isinstance(content, dict | list):
            what = "section" if isinstance(content, dict) else "key outside of any section:"
            raise BadConfiguration(f"{place}: unknown {what} {section!r}; {_hint(section, SECTIONS)}")
        if (section == REPEATED) != isinstance(content, list):
            right = f"[[{section}]]" if section == REPEATED else f"[{section}]"
            raise BadConfiguration(f"{place}: the section is written {right}")
        tables = content if isinstance(content, list) else [content]
        for number, table in enumerate(tables):
            given |= _from_table(path, text, section, number, table)
    return given


def _from_table(
    path: str, text: str, section: str, number: int, table: Mapping[str, object]
) -> dict[str, _Given]:
    keys = [setting.key for setting in SETTINGS if setting.section == section]
    given = {}
    for key, raw in table.items():
        place = f"{path}:{_line(text, section, key, number)}"
        if key not in keys:
            raise BadConfiguration(f"{place}: unknown key {key!r} in [{section}]; {_hint(key, keys)}")
        given[name_in(number, f"{section}.{key}")] = _Given(raw, place)
    if section == REPEATED and "path" not in table:
        place = f"{path}:{_line(text, section, number=number)}"
        raise BadConfiguration(f"{place}: a device needs a path: add `path = ...`")
    return given


def _hint(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}known are: {', '.join(known)}"


def _line(text: str, section: str, key: str = "", number: int = 0) -> int:
    """The line of a section's `number`th header or of a key behind it, from 1 (tomllib does not tell).

    The file is valid TOML when this is asked, so looking for words at the start of lines is enough.
    """
    header = rf"\[\[?\s*[\"']?{re.escape(section)}[\"']?\s*(\]|\.)"
    dotted = rf"[\"']?{re.escape(section)}[\"']?\s*(\.\s*[\"']?{re.escape(key)}|=)"
    headers = 0
    inside = False
    found = 1
    for at, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            is_header = re.match(header, stripped) is not None
            inside = is_header and headers == number
            headers += is_header
            found = at if inside else found
            if inside and not key:
                return at
        elif re.match(dotted, stripped) or (
            inside and key and re.match(rf"[\"']?{re.escape(key)}[\"']?\s*[.=]", stripped)
        ):
            return at
    return found
