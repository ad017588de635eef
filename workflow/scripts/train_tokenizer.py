"""Train a byte-level BPE tokenizer as a specification says, once per identity, and write its manifest."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from megaboa import store
from megaboa.bridge import zygote
from megaboa.data import sources, tokenizer
from megaboa.data.readers import Format, documents
from megaboa.errors import InputError, one_sentence
from megaboa.records import Tokenizer, TokenizerSpec, read, write

# What decides which text is taken, beside the files.
DECIDING = ("text_key", "separator", "limit", "max_document_mb", "on_bad_record")


def train(spec: TokenizerSpec) -> Tokenizer:
    text = spec.train_on
    files = sources.files(text)
    form = Format.of(text)
    listed = sources.listing(files, Path(spec.store) / "digests")
    identity = {
        "files": sources.fingerprint(listed),
        **{key: getattr(text, key) for key in DECIDING},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    with one_sentence(args.out):
        manifest = train(read(TokenizerSpec, args.spec))
        write(args.out, manifest)
    print(f"tokenizer {manifest.name}: {manifest.vocab_size} tokens, {manifest.path}")


if __name__ == "__main__":
    zygote.hand_over()
    main()
