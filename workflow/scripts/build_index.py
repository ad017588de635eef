"""Build Megatron's index of the data that some runs share, as a specification says, and write its manifest."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaboa import store
from megaboa.bridge import process, zygote
from megaboa.bridge.quiet import quietly
from megaboa.errors import one_sentence
from megaboa.files import read_json, write_json
from megaboa.paths import FACTS, RunFolder
from megaboa.records import DataIndex, parse, write
from megaboa.run.inputs import UnusableInputError, check_data


def build(spec: dict[str, Any], experiment: Path) -> DataIndex:
    folder = RunFolder(experiment / "runs" / spec["run"])
    check_data(folder)
    with quietly():  # from the import on: it is then that loggers take hold of stderr
        process.prepare("cpu")
        from megaboa.bridge import index
    final = store.folder(spec["store"], "indexes", spec["name"], index.identity(folder, spec["key"]))
    with store.building(final) as partial:
        if partial:
            with quietly():
                facts = index.build(folder, partial / "cache")
            write_json(partial / FACTS, facts)
    made = {"name": spec["name"], "cache": str(final / "cache"), "max_epochs": spec["max_epochs"]}
    found = parse(DataIndex, {**read_json(final / FACTS), **made}, final / FACTS)
    return replace(found, warnings=tuple(index.warnings(found.corpora, spec["max_epochs"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path, help="specs/indexes/<name>.json of an experiment")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    with one_sentence(args.out):
        manifest = build(read_json(args.spec), args.spec.parents[2])
        write(args.out, manifest)
    samples = ", ".join(f"{count:,} {split}" for split, count in manifest.samples.items())
    print(f"index {manifest.name}: samples: {samples}; {manifest.cache}")
    for row in manifest.corpora:
        print(
            f"  {row.name}: weight {row.weight:.3g}, {row.tokens_asked:,} of {row.tokens:,} tokens: "
            f"{row.epochs:.3g} epochs"
        )
    for warning in manifest.warnings:
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    zygote.hand_over()
    try:
        main()
    except UnusableInputError as error:
        sys.exit(f"error: {error}")
