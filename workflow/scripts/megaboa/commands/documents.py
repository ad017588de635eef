"""List which documents of which corpus a step of a run read, by Megatron's own index.

Documents are counted from 0, as in the corpus's .idx; `from` is the document's first token in the sample. It may be
called before, while and after the run trains.
"""

import dataclasses
import json
import sys

from megaboa import commands
from megaboa.check.facts import from_json
from megaboa.data import batches
from megaboa.errors import InputError
from megaboa.formats import aligned, counted
from megaboa.paths import RunFolder
from megaboa.run import submitted


def main(words: list[str]) -> None:
    parser = commands.parser("documents", __doc__)
    parser.add_argument("run", type=commands.run, help="EXPERIMENT/RUN, or the run's folder")
    parser.add_argument("--step", type=int, required=True, help="counted from 1")
    parser.add_argument("--rank", type=int, help="only samples of this rank's copy of the model; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample's pieces")
    args = parser.parse_args(words)
    folder = RunFolder(args.run)
    checked = folder.preflight
    layout = from_json(checked.facts).layout if checked and checked.facts and folder.run.is_recipe else None
    try:
        batch = batches.of_step(folder, args.step, args.rank, layout)
    except batches.UnmadeError as error:
        again = submitted.last(folder.experiment_folder.path).with_words(error.words)
        raise InputError(f"{error.what}: call `{again}`") from error
    if args.json:
        json.dump(dataclasses.asdict(batch), sys.stdout, indent=1)
        print()
    else:
        print("\n".join(lines(batch)))


def lines(batch: batches.Batch) -> list[str]:
    by_corpus, documents = batch.corpora, batch.documents
    total = sum(by_corpus.values())
    first, last = batch.samples[0].number, batch.samples[-1].number
    samples = f"{counted(len(batch.samples), 'sample')} of {first} to {last}"
    found = [f"step {batch.step} of {batch.run}: {samples}, {total:,} tokens"]
    for corpus, tokens in by_corpus.most_common():
        count = sum(name == corpus for name, _, _ in documents)
        found.append(f"  {corpus}: {tokens / total:.1%} of the tokens, {counted(count, 'document')}")
    rows = [("sample", "dp", "corpus", "document", "from", "tokens", "source")]
    for sample in batch.samples:
        for piece in sample.pieces:
            place = piece.source or piece.dataset
            numbers = (sample.number, sample.copy, piece.corpus, piece.document, piece.begin, piece.tokens, place)
            rows.append(tuple(map(str, numbers)))
    return [*found, *aligned(rows)]
