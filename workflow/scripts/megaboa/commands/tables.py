"""Tables and schemas of this repository that are written by the code that they tell of.

With --check nothing is written, and what isn't up to date is an error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from megaboa import commands, files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly

ROOT = commands.MEGABOA.resolve().parents[2]
CHECK = "write nothing, and fail if something is not up to date"


def write_schema(words: list[str]) -> int:
    """Write the JSON schema, and tables of keys, rules, kinds and pinned versions.

    These are in config/README.md, docs/reference/rules.md, docs/reference/kinds.md and containers/README.md.
    """
    parser = commands.job(write_schema)
    parser.add_argument("--check", action="store_true", help=CHECK)
    check = parser.parse_args(words).check
    from megaboa import layout, model_kinds
    from megaboa.check import table as rules
    from megaboa.config import describe
    from megaboa.image import pins

    texts = {ROOT / "workflow/schemas/experiment.schema.json": describe.schema_text()}
    for name, subject, table in (
        ("config/README.md", "keys", describe.markdown()),
        ("containers/README.md", "versions", pins.markdown()),
        ("docs/reference/rules.md", "rules", rules.markdown()),
        ("docs/reference/kinds.md", "kinds", model_kinds.markdown(layout.NAMES)),
    ):
        texts[ROOT / name] = with_table((ROOT / name).read_text(encoding="utf-8"), subject, table)
    return _written(texts, check, "megaboa write-schema")


def write_config_keys(words: list[str]) -> int:
    """Write the keys that Hugging Face configs of each family can have."""
    parser = commands.job(write_config_keys)
    parser.add_argument("--check", action="store_true", help=CHECK)
    check = parser.parse_args(words).check
    from megaboa.bridge import config_class_keys
    from megaboa.config.config_keys import TABLE
    from megaboa.plan import families

    text = json.dumps(config_class_keys.found(families.CONVERTIBLE), indent=1, sort_keys=True) + "\n"
    return _written({TABLE: text}, check, "megaboa write-config-keys")


def list_recipes(words: list[str]) -> None:
    """Say of Bridge's recipes for language models whether preflight accepts them.

    The hub is not asked: models have the configs of a file, {Hugging Face id: config}.
    `megaboa list-recipes --configs tests/fixtures/hf_configs.json --page docs/reference/recipes.md` writes the page's
    table again; without --page it is printed.
    """
    parser = commands.job(list_recipes)
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="these recipes instead of all")
    parser.add_argument("--names", action="store_true", help="first print the names of all recipes, as a line of JSON")
    parser.add_argument("--page", type=Path, help="Markdown page whose table is written again")
    args = parser.parse_args(words)
    os.environ["HF_HUB_OFFLINE"] = "1"
    configs = files.read_json(args.configs)
    with quietly():
        process.prepare("cpu")
        from megaboa.bridge import recipes

        names = recipes.names()
        table = recipes.table(args.only or names, configs)
    if args.names:
        print(json.dumps(names))
    if args.page:
        files.write_text(args.page, with_table(args.page.read_text(encoding="utf-8"), "recipes", table))
    else:
        print(table, end="")


def with_table(page: str, subject: str, table: str) -> str:
    """A Markdown page with another table between the comments `subject: generated ...` and `end of subject`."""
    around = re.compile(rf"(<!-- {subject}: generated [^>]* -->\n).*(<!-- end of {subject} -->)", re.DOTALL)
    before, begin, end, after = around.split(page)
    return f"{before}{begin}\n{table.rstrip()}\n\n{end}{after}"


def _written(texts: dict[Path, str], check: bool, command: str) -> int:
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not up to date: run {command}", file=sys.stderr)
        else:
            files.write_text(path, texts[path])
    return 1 if check and stale else 0
