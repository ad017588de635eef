"""List a corpus's files with their checksums; decide where its tokens lie."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.data.errors import one_sentence
from megaboa.data.jobs import list_sources
from megaboa.files import read_json, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--threads", type=int, default=1, help="files that are read at the same time")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    listing = list_sources(read_json(args.spec), args.threads)
    write_json(args.out, listing)
    size = sum(file["size"] for file in listing["files"])
    print(f"corpus {listing['name']}: {len(listing['files']):,} files, {size / 1e6:,.1f} MB, {listing['folder']}")


if __name__ == "__main__":
    with one_sentence():
        main()
