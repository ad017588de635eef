"""Text to token ids, with gigatoken if it supports the tokenizer, or else `tokenizers`; samples are compared.

`tokenizers`, as loaded by `transformers`, is the reference that the output must equal. It is read from a saved file,
because importing transformers takes seconds and gigabytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megaboa.data.indexed import token_dtype
from megaboa.errors import InputError
from megaboa.records import FrozenTokenizer

# Texts for which encoders tend to differ; tried before gigatoken is used.
HARD_TEXTS = [
    "It's we'll I'VE don't 'tis ''s",
    "  two\t tabs \t\n\n \n  and   spaces ",
    "def f(x):\n\treturn x**2  # ok\r\n\r\n",
    "1234567890 3.14159 1,000,000 0x1F 12345678901234567890",
    "e\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u212b \u00bd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "\U0001f923 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\ufeffmark \u200b\u00a0\u2003\u3000 nul\x00 bell\x07 \x7f \ufffd",
    "<s> </s> <unk> <pad> <|endoftext|> <|im_start|>user\n[INST] <bos>",
    "!!!???...---===<<<>>>((()))",
    "A" * 300 + "\n" * 50 + " " * 100,
]
GATE_CHARACTERS = 200_000  # compared with the reference, per shard
GATE_LONGEST = 50_000  # characters that are compared of a document, at most
FIRST_LONGEST = 5_000  # of each of the first documents, so that the budget suffices for the random ones
FIRST = 20
# gigatoken caches every word. It is restarted when the cache takes this much memory.
CACHE_BYTES = 300 << 20
CHARACTERS_BETWEEN_STARTS = 32_000_000


@dataclass(frozen=True)
class Tokens:
    """The concatenated ids of some documents, and the length of each."""

    ids: NDArray
    lengths: NDArray


class Encoder:
    def __init__(
        self,
        loaded: FrozenTokenizer,
        append_eod: bool,
        prepend_bos: bool | None,
        kind: str = "auto",
        key: str = "",
        threads: int = 1,
    ) -> None:
        """`loaded`: the result of `tokenizer.freeze`; `key`: used in error messages, such as `corpora.wiki`."""
        self.reference = tokenizers.Tokenizer.from_file(loaded.file)
        self.vocab_size = loaded.size
        self.dtype = token_dtype(self.vocab_size)
        self._loaded, self._key, self._threads = loaded, key, threads
        self._as_tokenizer_does = prepend_bos is None
        # A vocabulary may have gaps and ids above its size, so ids are checked before they are converted to a smaller
        # type.
        largest = max(self.reference.get_vocab(with_added_tokens=True).values(), default=0)
        self._held_in = self.dtype if largest <= np.iinfo(self.dtype).max else np.dtype(np.uint32)
        self.prefix, self.suffix = self._surroundings(prepend_bos)
        if append_eod:
            self.suffix = [*self.suffix, self._special("eos", "append_eod")]
        self._fast, self.name = None, f"tokenizers {version('tokenizers')}"
        self.refused: str | None = None
        if kind != "tokenizers":
            self._fast, self.refused = _gigatoken(self.reference)
            self._memory, self._characters = memory(), 0
            if self._fast is not None:
                self.name = f"gigatoken {version('gigatoken')}"
            elif kind == "gigatoken":
                raise InputError(
                    f"{key}.encoder: gigatoken doesn't take this tokenizer ({self.refused}); remove the key"
                )

    def encode(self, texts: Sequence[str]) -> Tokens:
        """The tokens of non-empty texts."""
        try:
            plain = self._plain(list(texts))
        except MemoryError:
            raise
        except Exception as error:  # the libraries may raise anything
            if refusal := self._refusal(texts, error):
                raise refusal from error
            raise
        return surround(plain, self.prefix, self.suffix, self._held_in)

    def expected(self, text: str) -> list[int]:
        """The reference encoding of a text, by `tokenizers`."""
        if self._as_tokenizer_does:
            ids = self.reference.encode(text).ids
            return [*ids, *self.suffix[len(self.suffix) - self._appended :]]
        return [*self.prefix, *_ids(self.reference, text), *self.suffix]

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without a document's prefix and suffix."""
        return self.reference.decode(ids, skip_special_tokens=False)

    def require_equal(self, text: str, where: Callable[[], str]) -> None:
        """Raise an error if the two encoders disagree about a text."""
        made = self.encode([text]).ids.tolist()
        expected = self.expected(text)
        if made != expected:
            place = next((n for n, pair in enumerate(zip(made, expected, strict=False)) if pair[0] != pair[1]), None)
            at = f"at token {place}" if place is not None else f"in length ({len(made)} and {len(expected)})"
            raise InputError(
                f"{where()}: {self.name} and tokenizers {version('tokenizers')} differ {at}; "
                f"set {self._key}.encoder to `tokenizers`"
            )

    def _plain(self, texts: list[str]) -> list[NDArray]:
        if self._fast is None:
            encodings = self.reference.encode_batch_fast(texts, add_special_tokens=False)
            return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]
        self._bound_memory(sum(map(len, texts)))
        if self._threads == 1:  # a batch comes as an Awkward array, whose library takes half a second to import
            return list(map(self._fast.encode, texts))
        layout = self._fast.encode_batch(texts).layout
        ids = np.asarray(layout.content.data)
        return [ids[begin:end] for begin, end in pairwise(np.asarray(layout.offsets.data).tolist())]

    def _refusal(self, texts: Sequence[str], error: Exception) -> InputError | None:
        """An error about the document that can't be encoded; None if each text is fine by itself, or not even
        an empty one is."""

        def refuses(text: str) -> bool:
            try:
                self._plain([text])
            except Exception:  # as above
                return True
            return False

        text = next(filter(refuses, texts), None)
        if text is None or refuses(""):  # Ctrl-C within the library's imports leaves it unable to encode anything
            return None
        return InputError(
            f"{self._key}.tokenizer: {self.name} can't encode the document that begins with {text[:40]!r} "
            f"({one_line(error)}); take a tokenizer that has a token for what it doesn't know, or remove the document"
        )

    def _bound_memory(self, characters: int) -> None:
        self._characters += characters
        if self._characters < CHARACTERS_BETWEEN_STARTS or memory() - self._memory < CACHE_BYTES:
            return
        import gigatoken

        self._fast, self._characters = gigatoken.Tokenizer.from_json(self.reference.to_str()), 0

    def _surroundings(self, prepend_bos: bool | None) -> tuple[list[int], list[int]]:
        """The tokens before and after every document."""
        self._appended = 0
        if prepend_bos is not None:
            return ([self._special("bos", "prepend_bos")] if prepend_bos else []), []
        text = next((text for text in ("a", *HARD_TEXTS) if self._knows(text)), "")
        whole, plain = self.reference.encode(text).ids, _ids(self.reference, text)
        for begin in range(len(whole) - len(plain) + 1 if plain or not whole else 0):
            if whole[begin : begin + len(plain)] == plain:
                return whole[:begin], whole[begin + len(plain) :]
        raise InputError(f"{self._key}.tokenizer changes a text by more than what it puts around it; set `prepend_bos`")

    def _knows(self, text: str) -> bool:
        try:
            return bool(_ids(self.reference, text))
        except Exception:  # a tokenizer that has no token for unknown text
            return False

    def _special(self, name: str, option: str) -> int:
        value = getattr(self._loaded, name)
        if value is None:
            raise InputError(
                f"{self._key}.{option} is true, but tokenizer {self._loaded.path} has no {name.upper()} token; "
                "set it to false, or give the tokenizer one"
            )
        self._appended += name == "eos"
        return value


class Gate:
    """Selects documents of a shard for comparing the encoder with the reference."""

    def __init__(self, encoder: Encoder, expected_characters: int, seed: str) -> None:
        self._encoder, self._random = encoder, random.Random(seed)
        self._chance = min(1.0, GATE_CHARACTERS / max(1, expected_characters))
        self.documents = self.characters = 0

    def wants(self) -> bool:
        """Whether the next document is compared: the first ones are, and random others."""
        if self.characters >= 2 * GATE_CHARACTERS:
            return False
        return self.documents < FIRST or self._random.random() < self._chance

    def check(self, text: str, where: Callable[[], str]) -> None:
        """Compare a document; of a long one, only the beginning."""
        text = text[: FIRST_LONGEST if self.documents < FIRST else GATE_LONGEST]
        self._encoder.require_equal(text, where)
        self.documents += 1
        self.characters += len(text)


def surround(plain: Sequence[NDArray], prefix: Sequence[int], suffix: Sequence[int], dtype: np.dtype) -> Tokens:
    """Concatenate documents, with a prefix and suffix around each."""
    before = [np.array(prefix, dtype)] if prefix else []
    after = [np.array(suffix, dtype)] if suffix else []
    lengths = np.fromiter(map(len, plain), np.int64, len(plain)) + len(prefix) + len(suffix)
    pieces = [piece for ids in plain for piece in (*before, ids, *after)]
    return Tokens(np.concatenate(pieces, dtype=dtype, casting="unsafe") if pieces else np.empty(0, dtype), lengths)


def memory() -> int:
    """Resident bytes of this process; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _gigatoken(reference: tokenizers.Tokenizer) -> tuple[Any, str | None]:
    """gigatoken's encoder, or the reason why it can't be used."""
    import gigatoken

    try:
        fast = gigatoken.Tokenizer.from_json(reference.to_str())
        for text in HARD_TEXTS:
            if fast.encode(text).tolist() != _ids(reference, text):
                return None, f"it encodes {text[:40]!r} otherwise"
    except Exception as error:  # it rejects tokenizers in many ways
        return None, one_line(error)
    return fast, None
