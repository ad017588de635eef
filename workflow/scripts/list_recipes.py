"""Say of every recipe that Bridge ships for pretraining language models whether preflight accepts it as it is.

`list_recipes.py --configs tests/fixtures/hf_configs.json --page docs/reference/recipes.md` writes the page's table
again; without --page it is printed. The hub is not asked: models have the configs of that file, {Hugging Face id:
config}.
"""

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path

from megaboa import files
from megaboa.bridge import process
from megaboa.bridge.quiet import quietly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="these recipes instead of all")
    parser.add_argument("--names", action="store_true", help="first print the names of all recipes, as a line of JSON")
    parser.add_argument("--page", type=Path, help="Markdown page whose table is written again")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    configs, page = files.read_json(arguments.configs), arguments.page and arguments.page.absolute()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), quietly():
        # transformers takes `Qwen/Qwen3-8B` for a folder, where there is one.
        for name, config in configs.items():
            files.write_json(Path(name, "config.json"), config)
        process.prepare("cpu")
        from megaboa.bridge import recipes

        names = recipes.names()
        table = recipes.markdown(recipes.rows(arguments.only or names, Path(folder)))
    if arguments.names:
        print(json.dumps(names))
    if page:
        files.write_text(page, recipes.page_with_table(page.read_text(encoding="utf-8"), table))
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
