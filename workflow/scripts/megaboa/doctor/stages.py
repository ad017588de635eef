"""What comes before training and failed: by the log of its job, where its manifest is not there."""

from __future__ import annotations

import re
from pathlib import Path

from megaboa.doctor import advice, classes
from megaboa.files import read_json
from megaboa.launch.ranks import Ended
from megaboa.run.failures import EVIDENCE_LENGTH, classify, read_tails

KINDS = ("models", "tokenizers", "corpora", "indexes")  # of specifications
# The sentence of a mistake that a user can mend, the last line of a traceback, what preflight says.
REFUSED = re.compile(r"^.*(?:\b(?:is|are) refused(?: in the image)?: |; nothing was trained\.$).*$", re.MULTILINE)
ENDED = re.compile(r"^(?:error: |(?:\w+\.)*\w*(?:Error|Exception)\b).*$", re.MULTILINE)


def failed(results: Path) -> list[str]:
    return [line for log, manifest in _jobs(results) if log.exists() and not manifest.exists() for line in _told(log)]


def _jobs(results: Path) -> list[tuple[Path, Path]]:
    """The log and the manifest of every job that the plan's specifications ask for."""
    logs = results / "logs"
    inside = results / "specs" / "inside.json"
    boxed = inside.exists() and "container" in read_json(inside)
    first = ("image", "preflight", *(["preflight-in-image"] if boxed else []))
    jobs = [(logs / f"{name}.log", results / f"{name}.json") for name in first]
    names = {kind: sorted(path.stem for path in (results / "specs" / kind).glob("*.json")) for kind in KINDS}
    for model in names["models"]:
        for part in ("source", "import", "proof"):
            jobs.append((logs / "models" / f"{model}.{part}.log", results / "models" / model / f"{part}.json"))
    for one in names["tokenizers"]:
        jobs.append((logs / "tokenizers" / f"{one}.log", results / "tokenizers" / f"{one}.json"))
    for corpus in names["corpora"]:
        folder, merged = logs / "data" / corpus, results / "data" / f"{corpus}.json"
        for part in ("sources", "verification"):
            jobs.append((folder / f"{part}.log", results / "data" / corpus / f"{part}.json"))
        jobs += [(log, merged) for log in [*sorted(folder.glob("shard-*.log")), folder / "merge.log"]]
    for one in names["indexes"]:
        jobs.append((logs / "data" / "indexes" / f"{one}.log", results / "data" / "indexes" / f"{one}.json"))
    return jobs


def _told(log: Path) -> list[str]:
    """Nothing of a job that is still at work."""
    text = read_tails([(None, log)])[None]
    name = str(log.with_suffix("")).split("/logs/")[-1]
    if refused := REFUSED.findall(text):
        return [f"{name}: refused", *(f"  | {line}" for line in refused), f"  logs: {log}"]
    if not (said := ENDED.findall(text)):
        return []
    cause = classify(Ended(0, 1), {None: text}, 0).cause
    found = classes.trouble(cause, said[-1][:EVIDENCE_LENGTH], {None: text})
    what = "failed" if found.name in ("unknown", "config") else found.name.replace("_", " ")
    return [
        f"{name}: {what}",
        *(f"  | {line}" for line in found.evidence),
        f"  logs: {log}",
        *(f"  try: {line}" for line in (advice.hub(advice.Case()) if found.name == "hub" else ())),
    ]
