"""Tokenize one shard of a corpus; killed, it starts over, and what is there was finished."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megaboa.records import CorpusSpec, Sources, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--sources", required=True, type=Path, help="what list_sources.py wrote")
    parser.add_argument("--shard", required=True, type=int, help="counted from 0")
    parser.add_argument("--shards", required=True, type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # before the encoders start their threads
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's would wait for work that never comes

    from megaboa.data.jobs import make_shard
    from megaboa.errors import one_sentence

    with one_sentence(args.out):
        spec, sources = read(CorpusSpec, args.spec), read(Sources, args.sources)
        write(args.out, make_shard(spec, sources, args.shard, args.shards, args.threads))


if __name__ == "__main__":
    main()
