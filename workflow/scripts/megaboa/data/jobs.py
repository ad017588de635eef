"""Jobs that make a tokenizer and a corpus: list files, tokenize a shard, merge the shards, compare with the source.

All jobs of a corpus work on one folder of the store, named by what determines the tokens: the text, the tokenizer and
the options, but not the number of shards. Experiments that need the same corpus share it. A job whose work is already
there does nothing.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from megaboa import store
from megaboa.data import examples, filters, given, sources, tokenizer, tokenizer_files, verify
from megaboa.data.documents import Format
from megaboa.data.encoder import Encoder
from megaboa.data.merging import merge
from megaboa.data.readers import documents
from megaboa.data.shards import divide
from megaboa.data.tokenizing import Options, tokenize_shard
from megaboa.errors import InputError, disk_full
from megaboa.files import digest, file_digest, link, read_json, write_json
from megaboa.records import (
    Corpus,
    CorpusFacts,
    CorpusSpec,
    Dataset,
    FrozenTokenizer,
    Shard,
    ShardMade,
    Sources,
    TextRead,
    Tokenizer,
    TokenizerSpec,
    Verification,
    read,
    write,
)
from megaboa.store_paths import FACTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1  # version of the interpretation of files and of the written format; raised when a corpus would change
# Options that determine a corpus's tokens, apart from its text and its tokenizer.
DECIDING = (
    "text_key",
    "separator",
    "limit",
    "min_characters",
    "deduplicate",
    "max_document_mb",
    "on_bad_record",
    "append_eod",
    "prepend_bos",
)
# Options that determine the text for training a tokenizer.
TEXT_DECIDING = ("text_key", "separator", "limit", "max_document_mb", "on_bad_record")
SECONDS_BETWEEN_LINES = 10  # lines of progress
WORKING_SECONDS = 60  # a shard that has reported since then is being processed


def make_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Train a tokenizer on a corpus's text, or convert it from files, unless it exists already."""
    if spec.train_on is None:
        return tokenizer_of_files(spec)
    text = spec.train_on
    files = sources.files(text)
    form = Format.of(text)
    listed = sources.listing(files, Path(spec.store) / "digests")
    identity = {
        "files": sources.fingerprint(listed),
        **{key: getattr(text, key) for key in TEXT_DECIDING},
        "vocab_size": spec.vocab_size,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
    }
    folder = store.folder(spec.store, "tokenizers", spec.name, identity)
    with store.building(folder) as partial:
        if partial:
            texts = documents(files, form, text.limit, text.on_bad_record == "skip", f"corpora.{text.name}")
            size = tokenizer.train(texts, spec.vocab_size, partial)
            if size != spec.vocab_size:
                raise InputError(
                    f"tokenizers.{spec.name}.vocab_size: {spec.vocab_size}, but the text of corpus "
                    f"{text.name!r} yields only {size} tokens; set it to {size} or take more text"
                )
    found = tokenizer.find(folder)
    return Tokenizer(name=spec.name, path=found.path, digest=found.digest, vocab_size=spec.vocab_size)


def _frozen(reference: tokenizer.Reference, loaded: PreTrainedTokenizerFast, folder: Path) -> FrozenTokenizer:
    """A tokenizer frozen to a file next to the corpus's folder."""
    frozen = folder.with_name(f"{folder.name}.tokenizer.json")
    with enough_room(folder), store.locked(folder.with_name(f".{folder.name}.lock")):
        for left in folder.parent.glob(f".{frozen.name}.*.tmp"):  # left by a killed job
            left.unlink()
        return tokenizer.freeze(reference, loaded, frozen)


def tokenizer_of_files(spec: TokenizerSpec) -> Tokenizer:
    """A tokenizer converted from existing files to a folder that `transformers` and Bridge can load."""
    key = f"tokenizers.{spec.name}"
    files = {kind: getattr(spec, kind) for kind in tokenizer_files.FILES}
    rules = {"pattern": spec.pattern, "special_tokens": spec.special_tokens, "vocab_size": spec.vocab_size}
    identity = {
        **{kind: file_digest(path) for kind, path in files.items() if path},
        **(rules if spec.tiktoken else {}),
        "transformers": version("transformers"),
    }
    folder = store.folder(spec.store, "tokenizers", spec.name, identity)
    with store.building(folder) as partial:
        if partial:
            _convert(spec, partial, key)
    found = tokenizer.find(folder)
    size = len(tokenizer.load(found))
    if not spec.vocab and size != spec.vocab_size:
        raise InputError(
            f"{key}: the plan counted {spec.vocab_size} tokens, and {size} came of it: was the file changed?"
        )
    return Tokenizer(name=spec.name, path=found.path, digest=found.digest, vocab_size=size)


def _convert(spec: TokenizerSpec, folder: Path, key: str) -> None:
    if spec.sentencepiece:
        tokenizer_files.from_sentencepiece(spec.sentencepiece, folder, key)
    elif spec.tiktoken:
        tokenizer_files.from_tiktoken(spec.tiktoken, folder, spec.pattern, spec.special_tokens, spec.vocab_size)
    else:
        tokenizer_files.from_gpt2(spec.vocab, spec.merges, folder, key)


def list_sources(spec: CorpusSpec, threads: int) -> Sources:
    """List the corpus's files with checksums, its tokenizer, and the folder for its tokens."""
    if spec.pairs:
        return list_pairs(spec, threads)
    if spec.example_keys:
        return list_examples(spec, threads)
    reference = tokenizer.resolve(spec.tokenizer, key=f"corpora.{spec.name}.tokenizer")
    with ThreadPoolExecutor(1) as pool:  # importing transformers takes as long as the checksum of a gigabyte
        loading = pool.submit(tokenizer.load, reference)
        digests = Path(spec.store) / "digests"
        with enough_room(digests):
            files = sources.listing(sources.files(spec), digests, threads)
    judging = filters.version(spec.filter) if spec.filter else None
    identity = {
        "format": FORMAT,
        "files": sources.fingerprint(files),
        "tokenizer": reference.digest,
        "transformers": version("transformers"),
        "tokenizers": version("tokenizers"),
        **{option: getattr(spec, option) for option in DECIDING},
        **({"filter": judging.sha256} if judging else {}),
    }
    folder = store.folder(spec.store, "corpora", spec.name, identity)
    loaded = _frozen(reference, loading.result(), folder)
    return Sources(
        name=spec.name, files=tuple(files), tokenizer=loaded, identity=identity, folder=str(folder), filter=judging
    )


def list_pairs(spec: CorpusSpec, threads: int) -> Sources:
    """List the user's own pairs. They stay in place, and the store only gets their facts."""
    digests = Path(spec.store) / "digests"
    with enough_room(digests):
        files = sources.listing(sources.files(spec), digests, threads)
    reference = tokenizer.resolve(spec.tokenizer, f"corpora.{spec.name}.tokenizer") if spec.tokenizer else None
    identity = {
        "format": FORMAT,
        "files": sources.fingerprint(files),
        "tokenizer": reference and reference.digest,
    }
    folder = store.folder(spec.store, "corpora", spec.name, identity)
    loaded = _frozen(reference, tokenizer.load(reference), folder) if reference else None
    return Sources(name=spec.name, files=tuple(files), tokenizer=loaded, identity=identity, folder=str(folder))


def list_examples(spec: CorpusSpec, threads: int) -> Sources:
    """List a corpus of examples. It has no tokenizer, because the tokens also depend on a template."""
    digests = Path(spec.store) / "digests"
    with enough_room(digests):
        files = sources.listing(sources.files(spec), digests, threads)
    if strange := next((file.path for file in files if file.kind == "text"), None):
        raise InputError(
            f"corpora.{spec.name}.source: {strange} holds text, and examples are records: give .jsonl, .parquet, "
            ".arrow, or a folder that `save_to_disk` wrote"
        )
    options = {option: getattr(spec, option) for option in examples.DECIDING}
    identity = {"format": FORMAT, "examples": examples.VERSION, "files": sources.fingerprint(files), **options}
    folder = store.folder(spec.store, "corpora", spec.name, identity)
    return Sources(name=spec.name, files=tuple(files), tokenizer=None, identity=identity, folder=str(folder))


def make_shard(spec: CorpusSpec, listing: Sources, shard: int, shards: int, threads: int = 1) -> ShardMade:
    """Tokenize one shard, unless the corpus or the shard exists already."""
    final = Path(listing.folder)
    if final.exists():
        return ShardMade(folder=None)
    options = Options.of(spec, judge_of(listing))
    parts = divide(listing.files, shards, spec.separator)[shard]
    folder = shard_folder(final, shard, shards)
    try:
        with enough_room(folder), store.building(folder) as partial:
            if partial:
                encoder = encoder_of(spec, listing, threads=threads)
                progress = Progress(spec.name, folder.parent / "progress", shard, shards)
                write(partial / FACTS, tokenize_shard(options, listing.files, parts, encoder, partial, progress))
    except FileNotFoundError:
        if not final.exists():  # otherwise another job has merged the corpus, and removed its shards
            raise
    return ShardMade(folder=str(folder))


def merge_shards(spec: CorpusSpec, listing: Sources, shards: int) -> Corpus:
    """Merge the shards, and return the corpus's manifest."""
    final = Path(listing.folder)
    with enough_room(final), store.building(final) as partial:
        if partial and spec.pairs:
            write(partial / FACTS, given.count(f"corpora.{spec.name}", spec.pairs, listing.tokenizer))
        elif partial and spec.example_keys:
            write(partial / FACTS, examples.write(spec, listing.files, partial))
        elif partial:
            folders = [shard_folder(final, shard, shards) for shard in range(shards)]
            made = [(folder, read(Shard, folder / FACTS)) for folder in folders]
            write(partial / FACTS, merge(Options.of(spec), made, partial, tokenizer.unknown(listing.tokenizer)))
    for leftover in final.parent.glob(f"{final.name}.shards-of-*"):  # including those of other numbers of shards
        shutil.rmtree(leftover, ignore_errors=True)
    return manifest(spec, listing, read(CorpusFacts, final / FACTS))


def verify_corpus(
    spec: CorpusSpec, listing: Sources, manifest: Corpus, problems: Callable[[Dataset, int], list[str]]
) -> Verification:
    """Compare a finished corpus with its source; `problems`: the check of `verify.check_corpus`."""
    folder, name = Path(listing.folder), manifest.name
    if not (facts := folder / FACTS).exists():
        raise InputError(f"{folder} is gone: below the results, remove data/{name}.json, and call again")
    if spec.pairs:
        verdict = given.check(manifest, listing.files, problems)
        if verdict.problems:
            raise InputError(f"corpora.{name}.megatron: {'; '.join(verdict.problems[:5])}: {given.AGAIN}")
        return Verification(corpus=name, digest=manifest.digest, compared=0, decoded_exactly=0)
    if spec.example_keys:
        verdict = examples.check(spec, manifest, listing.files)
        if verdict.problems:
            raise InputError(
                f"corpora.{name}: {verdict.problems[0]}: remove {folder}, and data/{name}.json below the results, and "
                "call again"
            )
        return Verification(corpus=name, digest=manifest.digest, compared=verdict.documents, decoded_exactly=0)
    encoder = encoder_of(spec, listing, "tokenizers")
    form = Format.of(spec, judge_of(listing))
    verdict = verify.check_corpus(form, listing, manifest, read(CorpusFacts, facts), encoder, problems)
    if verdict.problems:
        raise InputError(
            f"corpus {name} is not what its source says: {'; '.join(verdict.problems[:5])}. "
            f"Remove {folder}, and data/{name}.json below the results, and call again"
        )
    return Verification(
        corpus=name, digest=manifest.digest, compared=verdict.documents, decoded_exactly=verdict.decoded
    )


def manifest(spec: CorpusSpec, listing: Sources, facts: CorpusFacts) -> Corpus:
    loaded = listing.tokenizer
    words = tokenizers.Tokenizer.from_file(loaded.file) if loaded else None
    found = given.described(facts, spec.pairs, listing.files) if spec.pairs else _placed(facts, listing)
    datasets = tuple(
        replace(
            dataset,
            frequent=tuple((token, count, words.decode([token], False)) for token, count in dataset.frequent)
            if words
            else dataset.frequent,
            by_file=(),
        )
        for dataset in found
    )
    made = facts.examples
    if made:
        documents = dict(made.by_file)
        made = replace(made, path=str(Path(listing.folder) / examples.FILE), by_file=())
    elif spec.pairs:
        documents = dict(one for dataset in facts.datasets for one in dataset.by_file)
    else:
        documents = dict(facts.datasets[0].by_file)
    content = [made.sha256] if made else [dataset.sha256 for dataset in datasets]
    return Corpus(
        **{**vars(facts), "datasets": datasets, "examples": made},
        name=spec.name,
        digest=given.identity(datasets) if spec.pairs else digest(content),
        is_given=bool(spec.pairs),
        source=spec.source,
        sources=tuple(
            TextRead(
                path=file.path, kind=file.kind, size=file.size, sha256=file.sha256, documents=documents.get(number, 0)
            )
            for number, file in enumerate(listing.files)
        ),
        tokenizer=loaded and loaded.path,
        tokenizer_digest=loaded and loaded.digest,
        filter=listing.filter,
        identity={key: value for key, value in listing.identity.items() if key != "files"},
    )


def _placed(facts: CorpusFacts, listing: Sources) -> tuple[Dataset, ...]:
    """The datasets with their paths in the store."""
    folder = Path(listing.folder)
    stems = [Path(next(iter(dataset.sizes))).stem for dataset in facts.datasets]
    return tuple(replace(one, prefix=str(folder / stem)) for one, stem in zip(facts.datasets, stems, strict=True))


def link_files(manifest: Corpus, folder: Path) -> None:
    """Link the corpus's files into the folder of its manifest, unless they are the user's own."""
    if manifest.is_given:
        return
    for dataset in manifest.datasets:
        for name in dataset.sizes:
            link(Path(dataset.prefix).with_name(name), folder / name)


def judge_of(listing: Sources) -> filters.Judge | None:
    return filters.load(listing.filter, f"corpora.{listing.name}.filter") if listing.filter else None


def encoder_of(spec: CorpusSpec, listing: Sources, kind: str | None = None, threads: int = 1) -> Encoder:
    key = f"corpora.{spec.name}"
    if not Path(listing.tokenizer.file).exists():
        raise InputError(
            f"{listing.tokenizer.file} is gone: below the results, remove data/{spec.name}.json and "
            f"the folder data/{spec.name}, and call again"
        )
    return Encoder(listing.tokenizer, spec.append_eod, spec.prepend_bos, kind or spec.encoder, key, threads)


def shard_folder(final: Path, shard: int, shards: int) -> Path:
    return final.with_name(f"{final.name}.shards-of-{shards}") / f"{shard:05d}"


def enough_room(folder: Path) -> AbstractContextManager[None]:
    """Report a full disk as a one-sentence error, with the remedies for the store."""
    return disk_full(folder.parent, "Free some space, or set `store` to another place")


class Progress:
    """Prints a job's progress every few seconds, for its shard and for the whole corpus.

    `folder`: where the shards of a corpus exchange their progress.
    """

    def __init__(
        self, name: str, folder: Path, shard: int, shards: int, seconds: float = SECONDS_BETWEEN_LINES
    ) -> None:
        self._name, self._folder, self._shard, self._shards = name, folder, shard, shards
        self._seconds = seconds
        self._started = self._shown = time.time()

    def __call__(self, share: float, documents: int, tokens: int, text_bytes: int) -> None:
        now = time.time()
        if share < 1 and now - self._shown < self._seconds:
            return
        self._shown = now
        state = {
            "share": share,
            "documents": documents,
            "tokens": tokens,
            "text_bytes": text_bytes,
            "started": self._started,
            "time": now,
        }
        write_json(self._folder / f"{self._shard}.json", state)
        label = f"{self._name}, shard {self._shard + 1} of {self._shards}" if self._shards > 1 else self._name
        sys.stderr.write(progress_line(label, [state], 1, now) + "\n")
        if self._shards > 1:
            sys.stderr.write(
                progress_line(f"{self._name}, whole", read_progress(self._folder), self._shards, now) + "\n"
            )
        sys.stderr.flush()


def read_progress(folder: Path) -> list[dict[str, float]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read_json(path))
        except (OSError, ValueError):  # removed by the merge
            continue
    return found


def progress_line(label: str, states: list[dict[str, float]], shards: int, now: float) -> str:
    """A line such as `stdlib: 41 %, 12,000 documents, 31,000,000 tokens, 120 MB/s, 35 s left`."""
    done = sum(state["share"] for state in states)
    documents, tokens, text = (sum(state[name] for state in states) for name in ("documents", "tokens", "text_bytes"))
    # Measured over the working time of shards, not since the first began: they may have been interrupted for a night.
    worked = max(1e-3, sum(state["time"] - state["started"] for state in states))
    working = max(1, sum(state["share"] < 1 and now - state["time"] < WORKING_SECONDS for state in states))
    speed = text / worked * working / 1e6
    line = f"{label}: {done / shards:.0%}, {documents:,} documents, {tokens:,} tokens, {speed:,.0f} MB/s"
    left = worked * (shards - done) / done / working if done else None
    return line if not left else f"{line}, {duration(left)} left"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"
