"""Compare a finished corpus with its source, check its index, and read it as training will."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.bridge import zygote
from megaboa.bridge.corpus_samples import read_as_training_does
from megaboa.bridge.quiet import quietly
from megaboa.data.jobs import verify_corpus
from megaboa.errors import one_sentence
from megaboa.records import Corpus, CorpusSpec, Dataset, Sources, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--sources", required=True, type=Path)
    parser.add_argument("--manifest", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    with one_sentence(args.out):
        asked = read(CorpusSpec, args.spec), read(Sources, args.sources), read(Corpus, args.manifest)
        result = verify_corpus(*asked, problems)
        write(args.out, result)
    print(f"corpus {result.corpus}: its index is sound, {result.compared} documents are those of the source")


def problems(dataset: Dataset, vocab_size: int) -> list[str]:
    with quietly():
        return read_as_training_does(dataset, vocab_size)


if __name__ == "__main__":
    zygote.hand_over()
    main()
