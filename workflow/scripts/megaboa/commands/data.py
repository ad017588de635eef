"""From text to tokens, and to the samples that runs draw."""

from __future__ import annotations

import os
import sys

from megaboa import commands
from megaboa.bridge import handover, process
from megaboa.bridge.quiet import quietly
from megaboa.data.pairs import counted_documents
from megaboa.formats import counted
from megaboa.records import Corpus, CorpusSpec, IndexSpec, Sources, TokenizerSpec, read, write


def train_tokenizer(words: list[str]) -> None:
    """Train a byte-level BPE tokenizer, once per identity."""
    args = commands.job(train_tokenizer, "spec", "out").parse_args(words)
    handover.to_zygote("cpu")
    from megaboa.data.jobs import make_tokenizer

    manifest = make_tokenizer(read(TokenizerSpec, args.spec))
    write(args.out, manifest)
    print(f"tokenizer {manifest.name}: {manifest.vocab_size} tokens, {manifest.path}")


def list_sources(words: list[str]) -> None:
    """List a corpus's files with their checksums; decide where its tokens lie."""
    parser = commands.job(list_sources, "spec", "out")
    parser.add_argument("--threads", type=int, default=1, help="files that are read at the same time")
    args = parser.parse_args(words)
    # Tokenizers need no torch, and transformers would spend seconds and 700 MB on importing it.
    sys.modules["torch"] = None
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from megaboa.data.jobs import list_sources as listed

    listing = listed(read(CorpusSpec, args.spec), args.threads)
    write(args.out, listing)
    size = sum(file.size for file in listing.files)
    print(f"corpus {listing.name}: {counted(len(listing.files), 'file')}, {size / 1e6:,.1f} MB, {listing.folder}")


def tokenize_shard(words: list[str]) -> None:
    """Tokenize one shard of a corpus; killed, it starts over."""
    parser = commands.job(tokenize_shard, "spec", "sources", "out")
    parser.add_argument("--shard", required=True, type=int, help="counted from 0")
    parser.add_argument("--shards", required=True, type=int)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(words)
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # before the encoders start their threads
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's would wait for work that never comes
    from megaboa.data.jobs import make_shard

    spec, sources = read(CorpusSpec, args.spec), read(Sources, args.sources)
    write(args.out, make_shard(spec, sources, args.shard, args.shards, args.threads))


def merge_corpus(words: list[str]) -> None:
    """Merge a corpus's shards; link its files next to its manifest."""
    parser = commands.job(merge_corpus, "spec", "sources", "out")
    parser.add_argument("--shards", required=True, type=int)
    args = parser.parse_args(words)
    from megaboa.data.jobs import link_files, merge_shards
    from megaboa.data.tokenizer import unknown_tokens

    manifest = merge_shards(read(CorpusSpec, args.spec), read(Sources, args.sources), args.shards)
    link_files(manifest, args.out.parent)
    write(args.out, manifest)
    documents = counted_documents(manifest.datasets) if manifest.datasets else counted(manifest.documents, "document")
    print(f"corpus {manifest.name}: {documents}, {manifest.tokens:,} tokens")
    if warning := unknown_tokens(manifest.name, manifest):
        print(f"warning: {warning}", file=sys.stderr)
    if bad := manifest.bad.records:
        print(f"left out, as they can't be used: {bad:,} records, the first of them:")
        print("\n".join(f"  {sample}" for sample in manifest.bad.samples))
    if (filtered := manifest.filtered) and filtered.records:
        print(f"dropped by {manifest.filter.path}: {filtered.records:,} records, of each reason the first:")
        for reason, count in filtered.reasons.items():
            print("\n".join([f"  {reason}: {count:,}", *(f"    {sample}" for sample in filtered.samples[reason])]))


def verify_corpus(words: list[str]) -> None:
    """Compare a corpus with its source, check its index, read it as training will."""
    args = commands.job(verify_corpus, "spec", "sources", "manifest", "out").parse_args(words)
    handover.to_zygote("cpu")
    from megaboa.bridge.corpus_samples import read_as_training_does
    from megaboa.data.jobs import verify_corpus as verified

    given = read(CorpusSpec, args.spec), read(Sources, args.sources), read(Corpus, args.manifest)
    result = verified(*given, quietly()(read_as_training_does))
    write(args.out, result)
    compared = f", {result.compared} documents are those of the source" if result.compared else ""
    print(f"corpus {result.corpus}: its index is sound{compared}")


def build_index(words: list[str]) -> None:
    """Build Megatron's index of the data that some runs share, once per identity."""
    args = commands.job(build_index, "spec", "out").parse_args(words)
    handover.to_zygote("cpu")
    with quietly():  # from the import on: it is then that loggers take hold of stderr
        process.prepare("cpu")
        from megaboa.bridge.index import make
    manifest = make(read(IndexSpec, args.spec), args.spec.parents[2])
    write(args.out, manifest)
    samples = ", ".join(f"{count:,} {split}" for split, count in manifest.samples.items())
    print(f"index {manifest.name}: samples: {samples}; {manifest.cache}")
    for row in manifest.corpora:
        name = f"  {row.prefix}" if row.prefix else row.name
        print(
            f"  {name}: weight {row.weight:.3g}, {row.tokens_asked:,} of {row.tokens:,} tokens: {row.epochs:.3g} epochs"
        )
    for warning in manifest.warnings:
        print(f"warning: {warning}", file=sys.stderr)
