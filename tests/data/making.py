"""Small corpora, made as the jobs make them."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import zstandard

from megaboa.data import jobs
from megaboa.data.indexed import Index
from megaboa.data.merging import merge
from megaboa.data.shards import divide
from megaboa.data.sources import file_of, kind_of
from megaboa.data.tokenizing import Options, tokenize_shard
from megaboa.records import CorpusSpec

TEXTS = [f"Satz Nummer {number}: äöü {'wort ' * (number % 7)}" for number in range(60)]


def specification(folder, source, tokenizer, **changes):
    asked = {
        "name": "c",
        "store": str(Path(folder, "store")),
        "source": source if isinstance(source, list) else str(source),
        "text_key": "text",
        "separator": None,
        "subset": None,
        "split": "train",
        "revision": None,
        "limit": None,
        "min_characters": 0,
        "deduplicate": False,
        "on_bad_record": "error",
        "max_document_mb": 256,
        "append_eod": True,
        "prepend_bos": None,
        "encoder": "auto",
        "tokenizer": {"kind": "path", "path": str(tokenizer)},
    }
    return CorpusSpec(**{**asked, **changes})


def make(spec, shards=1):
    """The manifest of a corpus."""
    listing = jobs.list_sources(spec, 1)
    for shard in range(shards):
        jobs.make_shard(spec, listing, shard, shards)
    return jobs.merge_shards(spec, listing, shards)


def build(folder, paths, encoder, shards=1, **changes):
    """A corpus without a store: its facts, and the bytes of its files by name."""
    options = Options.of(specification(folder, "", "", **changes))
    files = [file_of(path, *kind_of(path)) for path in paths]
    made = []
    for shard, parts in enumerate(divide(files, shards, options.form.separator)):
        out = folder / f"{shard}-of-{shards}"
        out.mkdir(parents=True)
        made.append((out, tokenize_shard(options, files, parts, encoder, out)))
    out = folder / f"merged-{shards}"
    out.mkdir()
    facts = merge(options, made, out)
    return facts, {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.suffix in (".bin", ".idx")}


def payload(manifest):
    return [Path(f"{data.prefix}.{end}").read_bytes() for data in manifest.datasets for end in ("bin", "idx")]


def documents(dataset):
    """Every document's token ids."""
    index = Index.open(Path(f"{dataset.prefix}.idx"))
    assert index.problems() == []
    data = np.fromfile(f"{dataset.prefix}.bin", index.dtype)
    return [index.tokens(data, number).tolist() for number in range(len(index.lengths))]


def jsonl(path, records):
    """A file of records: texts, other JSON values, or lines as they are (bytes). Packed as its name says."""
    lines = []
    for record in records:
        if not isinstance(record, bytes):
            record = json.dumps({"text": record} if isinstance(record, str) else record, ensure_ascii=False).encode()
        lines.append(record + b"\n")
    return packed(path, b"".join(lines))


def packed(path, content):
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def sentences(count, seed=0):
    chance = random.Random(seed)
    words = ["the", "of", "Straße", "世界", "x", "value", "return", "\n", "1234", "été", "🐍"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 60))) + f" {n}" for n in range(count)]
