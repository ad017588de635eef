"""Tokenize a corpus as a specification says, once per identity; link its files beside the manifest and write that."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megaboa import store
from megaboa.data import sources, tokenizer
from megaboa.data.corpus import tokenize
from megaboa.data.errors import one_sentence
from megaboa.files import digest, file_digest, link, read_json, write_json

FACTS = "facts.json"


def build(spec: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The corpus's folder in the store, and its manifest."""
    name = spec["name"]
    reference = tokenizer.resolve(spec["tokenizer"], key=f"corpora.{name}.tokenizer")
    identity = {
        "files": sources.fingerprint(spec["source"]),
        "text_key": spec["text_key"],
        "limit": spec["limit"],
        "append_eod": spec["append_eod"],
        "tokenizer": reference.digest,
        "transformers": version("transformers"),
        "tokenizers": version("tokenizers"),
    }
    folder = store.folder(spec["store"], "corpora", name, identity)
    with store.building(folder) as partial:
        if partial:
            texts = sources.documents(spec["source"], spec["text_key"], spec["limit"])
            facts = tokenize(texts, reference, spec["append_eod"], partial / name)
            digests = {f"{name}.{end}": file_digest(partial / f"{name}.{end}") for end in ("bin", "idx")}
            size = (partial / f"{name}.bin").stat().st_size
            write_json(partial / FACTS, {**facts, "bytes": size, "files": digests})
    facts = read_json(folder / FACTS)
    manifest = {
        "name": name,
        "datasets": [dataset(folder / name, spec["text_key"], facts)],
        "source": spec["source"],
        "tokenizer_digest": reference.digest,
        "digest": digest(facts["files"]),
        **facts,
    }
    return folder, manifest


def dataset(prefix: Path, key: str, facts: dict[str, Any]) -> dict[str, Any]:
    files = {end: prefix.with_name(f"{prefix.name}.{end}") for end in ("bin", "idx")}
    return {
        "key": key,
        "prefix": str(prefix),
        "documents": facts["documents"],
        "tokens": facts["tokens"],
        "sizes": {path.name: path.stat().st_size for path in files.values()},
        "largest_token": int(np.memmap(files["bin"], dtype=facts["dtype"], mode="r").max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    folder, manifest = build(read_json(args.spec))
    for file in manifest["files"]:
        link(folder / file, args.out.with_name(file))
    write_json(args.out, manifest)
    print(f"corpus {manifest['name']}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, {folder}")


if __name__ == "__main__":
    with one_sentence():
        main()
