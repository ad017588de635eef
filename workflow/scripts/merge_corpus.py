"""Put a corpus's shards together; link its files beside its manifest and write that."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.data.jobs import link_files, merge_shards
from megaboa.errors import one_sentence
from megaboa.records import CorpusSpec, Sources, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--sources", required=True, type=Path, help="what list_sources.py wrote")
    parser.add_argument("--shards", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    with one_sentence(args.out):
        manifest = merge_shards(read(CorpusSpec, args.spec), read(Sources, args.sources), args.shards)
        link_files(manifest, args.out.parent)
        write(args.out, manifest)
    print(f"corpus {manifest.name}: {manifest.documents:,} documents, {manifest.tokens:,} tokens")
    if bad := manifest.bad.records:
        print(f"left out, as they can't be used: {bad:,} records, the first of them:")
        print("\n".join(f"  {sample}" for sample in manifest.bad.samples))


if __name__ == "__main__":
    main()
