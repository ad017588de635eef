"""The outcome of a list of checks. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megaboa.files import write_json

Check = dict[str, Any]


def check(name: str, passed: bool, detail: str, difference: float | None = None) -> Check:
    """One check; `difference` where it is one of a number that is to be 0."""
    found = {"name": name, "state": "PASS" if passed else "FAIL", "detail": detail}
    return found if difference is None else {**found, "difference": difference}


def conclude(subject: str, checks: list[Check], out: Path, remedy: str = "", **more: Any) -> None:
    """Print every check and write the proof; where one failed, write nothing and end the process with an error.

    `more` is written into the proof: what it proves, and what was left out of it.
    """
    for one in checks:
        print(f"{one['state']} {one['name']}: {one['detail']}")
    failed = [one["name"] for one in checks if one["state"] != "PASS"]
    if failed:
        sys.exit(f"error: {subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}{remedy}")
    for name, why in more.get("left_out", {}).items():
        print(f"left out: {name}: {why}")
    write_json(out, {"state": "PASS", "checks": checks, **more})
