"""The outcome of a list of checks. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megaboa.files import write_json
from megaboa.results import FAILED_PROOF

Check = dict[str, Any]


def check(name: str, passed: bool, detail: str, difference: float | None = None) -> Check:
    """One check; `difference` where it is one of a number that is to be 0."""
    found = {"name": name, "state": "PASS" if passed else "FAIL", "detail": detail}
    return found if difference is None else {**found, "difference": difference}


def conclude(subject: str, checks: list[Check], out: Path, remedy: str = "", **more: Any) -> None:
    """Print every check and write the proof; where one failed, write what was seen beside it and end with an error.

    So a proof that is there is one. `more` is written into it: what it proves, and what was left out of it.
    """
    failure = out.with_name(FAILED_PROOF)
    for one in checks:
        print(f"{one['state']} {one['name']}: {one['detail']}")
    failed = [one["name"] for one in checks if one["state"] != "PASS"]
    if failed:
        write_json(failure, {"state": "FAIL", "checks": checks, **more})
        sys.exit(f"error: {subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}{remedy}")
    for name, why in more.get("left_out", {}).items():
        print(f"left out: {name}: {why}")
    write_json(out, {"state": "PASS", "checks": checks, **more})
    failure.unlink(missing_ok=True)
