"""List a corpus's files with their checksums; decide where its tokens lie."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megaboa.errors import one_sentence
from megaboa.records import CorpusSpec, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--threads", type=int, default=1, help="files that are read at the same time")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    # Tokenizers need no torch, and transformers would spend seconds and 700 MB on importing it.
    sys.modules["torch"] = None
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from megaboa.data.jobs import list_sources

    with one_sentence(args.out):
        listing = list_sources(read(CorpusSpec, args.spec), args.threads)
        write(args.out, listing)
    size = sum(file.size for file in listing.files)
    print(f"corpus {listing.name}: {len(listing.files):,} files, {size / 1e6:,.1f} MB, {listing.folder}")


if __name__ == "__main__":
    main()
