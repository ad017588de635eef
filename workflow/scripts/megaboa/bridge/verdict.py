"""The outcome of a list of checks. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

from megaboa.files import write_json

Check = dict[str, str]


def check(name: str, passed: bool, detail: str) -> Check:
    return {"name": name, "state": "PASS" if passed else "FAIL", "detail": detail}


def conclude(subject: str, checks: list[Check], out: Path) -> None:
    """Print every check and write the proof; where one failed, write nothing and end the process with an error."""
    for one in checks:
        print(f"{one['state']} {one['name']}: {one['detail']}")
    failed = [one["name"] for one in checks if one["state"] != "PASS"]
    if failed:
        sys.exit(f"error: {subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
    write_json(out, {"state": "PASS", "checks": checks})
