"""Compare a finished corpus with its source, check its index, and read it as training will."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megaboa.bridge.dataset import read_as_training_does
from megaboa.bridge.quiet import quietly
from megaboa.data import verify
from megaboa.data.errors import InputError, one_sentence
from megaboa.data.jobs import FACTS, encoder_of
from megaboa.data.records import Format
from megaboa.data.sources import File
from megaboa.files import read_json, write_json


def check(spec: dict[str, Any], listing: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    files = [File(**file) for file in listing["files"]]
    facts_file = Path(listing["folder"]) / FACTS
    if not facts_file.exists():
        raise InputError(
            f"{facts_file.parent} is gone: remove data/{manifest['name']}.json below the results, call again"
        )
    facts = read_json(facts_file)
    encoder, form = encoder_of(spec, listing, "tokenizers"), Format.of(spec)
    problems, documents, decoded = [], 0, 0
    for number, dataset in enumerate(manifest["datasets"]):
        if not dataset["documents"]:
            continue
        wrong = verify.check_index(dataset, manifest["dtype"])
        if not wrong:
            by_file = facts["datasets"][number]["by_file"]
            verdict = verify.check_documents(dataset, number, by_file, files, form, encoder)
            documents, decoded = documents + verdict.documents, decoded + verdict.decoded
            with quietly():
                unread = read_as_training_does(dataset, encoder.vocab_size)
            wrong = verdict.problems + unread
        problems += wrong
    return {
        "corpus": manifest["name"],
        "digest": manifest["digest"],
        "compared": documents,
        "decoded_exactly": decoded,
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--sources", required=True, type=Path)
    parser.add_argument("--manifest", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    result = check(read_json(args.spec), read_json(args.sources), read_json(args.manifest))
    if result["problems"]:
        folder = Path(read_json(args.sources)["folder"])
        raise InputError(
            f"corpus {result['corpus']} is not what its source says: {'; '.join(result['problems'][:5])}. "
            f"Remove {folder} and {args.manifest}, and call again"
        )
    write_json(args.out, result)
    print(f"corpus {result['corpus']}: its index is sound, {result['compared']} documents are those of the source")


if __name__ == "__main__":
    with one_sentence():
        main()
