"""docs/CONFIGURATION.md says what the code does."""

import re
import tomllib
from itertools import groupby
from pathlib import Path

from kvstore.node import REPEATED, SETTINGS, Setting, load_config


def row(setting: Setting) -> str:
    default = setting.default_text or f"`{str(setting.default).lower()}`"
    flag = (
        setting.flag
        if not isinstance(setting.default, bool)
        else f"{setting.flag}`, `--no-{setting.flag[2:]}"
    )
    return f"| `{setting.key}` | {default} | `{setting.variable}` | `{flag}` | {setting.meaning} |"


def tables() -> str:
    head = "| key | default | variable | flag | meaning |\n| --- | --- | --- | --- | --- |"
    sections = groupby(SETTINGS, key=lambda setting: setting.section)
    titles = {REPEATED: f"[[{REPEATED}]]"}
    return "\n\n".join(
        f"### {titles.get(name, f'[{name}]')}\n\n{head}\n" + "\n".join(map(row, rows))
        for name, rows in sections
    )


def test_every_key_is_described_as_it_is_declared(repository: Path) -> None:
    """When this fails, paste what it expected between the two marks."""
    page = (repository / "docs/CONFIGURATION.md").read_text()
    written = page.partition("<!-- settings -->\n\n")[2].partition("\n\n<!-- end -->")[0]
    assert written == tables()


def test_the_example_file_is_accepted(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs/CONFIGURATION.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o640)
    file = tmp_path / "kvstore.toml"
    file.write_text(example[1].replace("/etc/kvstore/token", str(token)).replace("64GiB", "64MiB"))
    origins = load_config({}, {}, str(file)).origins
    given = {name for name, origin in origins.items() if origin != "default"}
    assert given == {
        f"{section}.{key}" for section, keys in tomllib.loads(example[1]).items() for key in keys
    }
