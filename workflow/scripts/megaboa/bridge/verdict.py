"""The result of a list of checks. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

from megaboa.paths import FAILED_PROOF
from megaboa.records import Check, Proof, write


def check(name: str, passed: bool, detail: str, difference: float | None = None) -> Check:
    return Check(name=name, state="PASS" if passed else "FAIL", detail=detail, difference=difference)


def conclude(
    subject: str,
    checks: list[Check],
    out: Path,
    remedy: str = "",
    *,
    digest: str | None = None,
    left_out: dict[str, str] | None = None,
    image: tuple[str, ...] | None = None,
) -> None:
    """Print every check and write the proof; if a check failed, write the details next to it and exit with an error.

    So an existing proof has always passed. `digest`: digest of the proved files; `left_out`: checks that were not
    possible.
    """
    failure = out.with_name(FAILED_PROOF)
    for one in checks:
        # several proofs at a time print into one console
        print(f"{one.state} {subject}: {one.name}: {one.detail}")
    failed = [one.name for one in checks if not one.passed]
    facts = {"checks": tuple(checks), "digest": digest, "left_out": left_out, "image": image}
    if failed:
        write(failure, Proof(state="FAIL", **facts))
        sys.exit(f"error: {subject}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}{remedy}")
    for name, why in (left_out or {}).items():
        print(f"left out of the {subject}: {name}: {why}")
    write(out, Proof(state="PASS", **facts))
    failure.unlink(missing_ok=True)
