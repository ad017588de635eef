"""Tokenizers: trained here, from a folder, or from the hub; always as `transformers` loads them.

Used on the login node and, for models that are made from a config, inside the container.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from megaboa import store
from megaboa.data import hub
from megaboa.errors import InputError
from megaboa.files import digest, file_digest, read_json, write_text
from megaboa.records import Corpus, FrozenTokenizer, ModelSource, Tokenizer, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
FILE = "tokenizer.json"
UNKNOWN = 0.01  # share of unknown tokens above which a corpus is warned of
# The files that determine how text becomes tokens, unlike a chat template.
FILES = [
    FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
]


@dataclass(frozen=True)
class Reference:
    """The folder of a tokenizer, and the digest of its files."""

    path: str
    digest: str


def train(texts: Iterable[str], vocab_size: int, folder: str | Path) -> int:
    """Train a byte-level BPE tokenizer and save it for `AutoTokenizer`; return its number of tokens.

    The same texts give the same files. A short text may yield fewer tokens than requested.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PAD
    )
    fast.save_pretrained(str(folder))
    return len(fast)


def resolve(reference: dict[str, str], key: str) -> Reference:
    """The tokenizer in a specification. `key`: the key of the experiment file that names it, for error messages.

    `{"kind": "manifest", "manifest": ...}` is one trained here, `{"kind": "path", "path": ...}` a folder or a Hugging
    Face id, `{"kind": "model", "manifest": ...}` the tokenizer of a model.
    """
    match reference["kind"]:
        case "manifest":
            trained = read(Tokenizer, reference["manifest"])
            store.require(trained.path, reference["manifest"])
            return Reference(trained.path, trained.digest)
        case "model":
            source = read(ModelSource, reference["manifest"])
            if source.tokenizer is None:
                raise InputError(f"{key}: model {source.name!r} comes without a tokenizer; name one here")
            store.require(source.tokenizer, reference["manifest"])
            return Reference(source.tokenizer, source.tokenizer_digest)
        case "path":
            path = Path(reference["path"])
            folder = path if path.is_dir() else hub.download(reference["path"], None, FILES, key)[0]
            found = find(folder)
            if found is None:
                raise InputError(f"{key}: there are no tokenizer files in {folder}")
            return found
        case kind:
            raise ValueError(f"unknown kind of tokenizer reference: {kind!r}")


def is_in(folder: str | Path) -> bool:
    return any(Path(folder, name).exists() for name in (FILE, "tokenizer_config.json"))


def find(folder: str | Path) -> Reference | None:
    """The tokenizer in a folder; None if there is none."""
    if not is_in(folder):
        return None
    paths = sorted(set(itertools.chain.from_iterable(Path(folder).glob(pattern) for pattern in FILES)))
    return Reference(str(folder), digest({path.name: file_digest(path) for path in paths}))


def are_same(names: Iterable[str]) -> bool:
    """Whether these are folders whose files make tokens in the same way."""
    found = [find(Path(name).expanduser()) for name in names]
    return None not in found and len({one.digest for one in found if one}) == 1


def load(reference: Reference) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a folder; slow ones, written in Python, are refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference.path, local_files_only=True)
    if not tokenizer.is_fast:
        raise InputError(f"tokenizer {reference.path}: only a slow version in Python; convert it to a tokenizer.json")
    return tokenizer


def unknown(frozen: FrozenTokenizer) -> int | None:
    """The token for text that the tokenizer doesn't know; None if there is none, or if it also ends documents."""
    model = read_json(frozen.file)["model"]
    number = model.get("unk_id")
    if (token := model.get("unk_token")) is not None:
        number = vocabulary(Path(frozen.file)).get(token)
    return None if number in (frozen.eos, frozen.bos) else number


def vocabulary(file: Path) -> dict[str, int]:
    """The tokens in a tokenizer.json, with their ids."""
    content = read_json(file)
    known = content["model"].get("vocab") or {}
    found = known if isinstance(known, dict) else {token: number for number, (token, _) in enumerate(known)}
    return found | {token["content"]: token["id"] for token in content.get("added_tokens") or ()}


def contradiction(one: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """An id that stands for another token in another vocabulary; None if there is none in common that does. So a
    tokenizer and one that has more tokens agree."""
    named = {number: token for token, number in other.items()}
    for token, number in sorted(one.items(), key=itemgetter(1)):
        if named.get(number, token) != token:
            return f"token {number} is {token!r} in one, and {named[number]!r} in the other"
    return None


def unknown_tokens(name: str, corpus: Corpus) -> str | None:
    """A warning of a corpus whose text its tokenizer doesn't know; None if there is nothing to warn of."""
    count = sum(dataset.unknown for dataset in corpus.datasets)
    if count <= UNKNOWN * corpus.tokens:
        return None
    return (
        f"corpus {name!r}: {count / corpus.tokens:.1%} of its tokens stand for text that its tokenizer "
        f"({corpus.tokenizer}) doesn't know, and which is lost: take a tokenizer that has its characters, or bytes"
    )


def freeze(reference: Reference, tokenizer: PreTrainedTokenizerFast, file: Path) -> FrozenTokenizer:
    """Save a tokenizer, as `transformers` has loaded it, to a file that `tokenizers` alone can read."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    write_text(file, backend.to_str())
    return FrozenTokenizer(
        path=reference.path,
        digest=reference.digest,
        file=str(file),
        size=len(tokenizer),
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
    )
