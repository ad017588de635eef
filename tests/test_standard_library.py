"""What runs everywhere has the standard library alone: by the import contract, and when it is imported."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import megaboa

ROOT = Path(__file__).parents[1]
LIBRARY = Path(megaboa.__file__).parent
contracts = configparser.ConfigParser()
contracts.read(ROOT / ".importlinter")
SOURCES = contracts["importlinter:contract:hosts"]["source_modules"].split()


def test_the_modules_of_the_contract_are_imported_without_any_package():
    """The contract ignores imports in functions of `data`."""
    names = [name for source in SOURCES for name in modules(source)]
    left_out = ("megaboa.__main__", "megaboa.run.health_rank")  # runs a command; a process of its own with torch
    imports = "; ".join(f"import {name}" for name in names if name not in left_out)
    code = f"import sys; sys.path.insert(0, {str(LIBRARY.parent)!r}); {imports}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def modules(name):
    path = LIBRARY.parent / name.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    names = [".".join(file.relative_to(LIBRARY.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_what_the_architecture_says_of_it_is_in_the_contract():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rows = re.findall(
        r"^\| (?:everywhere|where text is read|compute host, outside[^|]*) \|([^|]*)\|", page, re.MULTILINE
    )
    assert len(rows) == 3
    everywhere, texts, hosts = (re.findall(r"`(\w+)`", row) for row in rows)
    told = {f"megaboa.{name}" for name in everywhere + hosts}
    told |= {f"megaboa.data.{name}" for name in texts if name != "data"}
    assert told == {name for name in SOURCES if name != "megaboa.__main__" and ".commands." not in name}, (
        "docs/explanation/architecture.md, Import worlds, and .importlinter, hosts, name the same modules"
    )
