"""Write workflow/schemas/experiment.schema.json, the table of keys in config/README.md from the typed models, the
table of rules in docs/reference/rules.md, and that of versions in containers/README.md.

With --check, write nothing, and fail if one of them is not up to date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megaboa.check import table
from megaboa.config.describe import readme_with_table, schema_text
from megaboa.files import write_text
from megaboa.image import pins

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    check = parser.parse_args().check
    readme, rules = ROOT / "config/README.md", ROOT / "docs/reference/rules.md"
    containers = ROOT / "containers/README.md"
    wanted = {
        ROOT / "workflow/schemas/experiment.schema.json": schema_text(),
        readme: readme_with_table(readme.read_text(encoding="utf-8")),
        containers: pins.readme_with_table(containers.read_text(encoding="utf-8")),
        rules: table.page_with_table(rules.read_text(encoding="utf-8")),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(
                f"{path.relative_to(ROOT)} is not up to date: run python workflow/scripts/write_schema.py",
                file=sys.stderr,
            )
        else:
            write_text(path, wanted[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
