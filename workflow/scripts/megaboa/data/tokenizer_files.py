"""Tokenizers in other file formats that Megatron accepts, converted to `tokenizer.json` with the same ids.

These are GPT-2's vocab.json and merges.txt, SentencePiece's .model, and the JSON of Megatron's TikTokenizer. Neither
SentencePiece nor tiktoken is needed. Sizes are read with the standard library, as the plan requires.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaboa.data.tokenizer import END_OF_TEXT
from megaboa.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = ("vocab", "merges", "sentencepiece", "tiktoken")  # keys that name the files
# SentencePiece's constants: space character, kinds of models, kind of user-defined pieces.
SPACE = "▁"
UNIGRAM, BPE = 1, 2
USER_DEFINED = 4
# megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py, 0.19
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
MOST_TOKENS = 2**17  # TikTokenizer's default size
BYTES = 256  # the first ranks are single bytes


# Number of tokens


def size(path: str, kind: str, special_tokens: int = 0) -> int:
    """Number of tokens in a file of kind `vocab`, `sentencepiece` or `tiktoken`; raises InputError if it isn't one."""
    expanded = Path(path).expanduser()
    return _size(str(expanded), kind, expanded.stat().st_mtime_ns) + special_tokens


@functools.cache
def _size(path: str, kind: str, _changed: int) -> int:
    if kind == "sentencepiece":
        return len(_pieces(path))
    if kind == "tiktoken":
        return len(_ranked(path))
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path!r} is not GPT-2's vocab.json: {error}") from error
    if not isinstance(known, dict):
        raise InputError(f"{path!r} is not GPT-2's vocab.json: it isn't a mapping from tokens to numbers")
    return len(known) + (END_OF_TEXT not in known)


def vocabulary(files: Mapping[str, str]) -> dict[str, int] | None:
    """The tokens in a file of kind `vocab` or `sentencepiece`, with their ids; None of other kinds."""
    if path := files.get("vocab"):
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    if path := files.get("sentencepiece"):
        return {_text(piece): number for number, piece in enumerate(_pieces(str(Path(path).expanduser())))}
    return None


def _text(piece: bytes) -> str:
    """The text of a piece: the first field of its message, whose length takes a byte for every seven bits."""
    begin = 2 + sum(1 for _ in itertools.takewhile(lambda byte: byte >= 0x80, piece[1:]))
    length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(piece[1:begin]))
    return piece[begin : begin + length].decode(errors="replace")


def _pieces(path: str) -> list[bytes]:
    """The pieces of a SentencePiece model, the first field of its ModelProto.

    In protobuf's format, each field has a number for field and type, followed by the length. The second and third field
    define how text is cut; without them the file is truncated.
    """
    data, at = Path(path).read_bytes(), 0
    fields: dict[int, list[bytes]] = {}

    def number() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 64, 7):
            byte = data[at]
            at, value = at + 1, value | (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise IndexError

    try:
        while at < len(data):
            key, length = number(), number()
            if key & 7 != 2 or at + length > len(data):
                raise IndexError
            fields.setdefault(key >> 3, []).append(data[at : at + length])
            at += length
    except IndexError as error:
        raise InputError(f"{path!r} is not a model of SentencePiece") from error
    if not {1, 2, 3} <= fields.keys():
        raise InputError(f"{path!r} is not a whole model of SentencePiece: copy it again")
    return fields[1]


def _ranked(path: str) -> list[bytes]:
    """The tokens, by rank."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        tokens = [base64.b64decode(one["token_bytes"], validate=True) for one in found]
        sound = all(one["rank"] == rank for rank, one in enumerate(found))
    except (ValueError, TypeError, KeyError, RecursionError):
        tokens, sound = [], False
    if not sound or tokens[:BYTES] != [bytes([byte]) for byte in range(BYTES)] or len({*tokens}) < len(tokens):
        raise InputError(
            f"{path!r} is not what TikTokenizer reads: a JSON list of rank and token_bytes, in order, of which the "
            f"first {BYTES} are the bytes"
        )
    return tokens


# Conversion


def from_gpt2(vocab: str, merges: str, folder: str | Path, key: str) -> None:
    """Convert GPT-2's two files (Megatron's --vocab-file and --merge-file) to a tokenizer for `AutoTokenizer`."""
    from transformers import GPT2Tokenizer

    try:
        loaded = GPT2Tokenizer(vocab=vocab, merges=merges)
        whole = len(loaded("a b")["input_ids"]) > 0
    except Exception as error:  # the libraries may raise anything
        said = " ".join(str(error).split())[:200]
        raise InputError(f"{key}: {vocab} and {merges} are not GPT-2's vocab.json and merges.txt: {said}") from error
    if not whole:
        raise InputError(f"{key}: {vocab} and {merges} make nothing of a text: are they of one tokenizer?")
    loaded.save_pretrained(str(folder))


def from_sentencepiece(path: str, folder: str | Path, key: str) -> None:
    """Convert a SentencePiece model. SentencePiece doesn't split text, so it is only split at spaces if no piece spans
    one."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(Path(path).read_bytes())
    except Exception as error:  # protobuf's own exception
        raise InputError(f"{key}: {path!r} is not a model of SentencePiece") from error
    if not (proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        raise InputError(f"{key}: {path!r} is not a whole model of SentencePiece: copy it again")
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (UNIGRAM, BPE):
        raise InputError(f"{key}: {path} has a model of words or characters; only unigram and BPE are converted")
    if own := [one.piece for one in proto.pieces if one.type == USER_DEFINED]:
        shown = ", ".join(own[:3])
        raise InputError(f"{key}: {path} has user_defined_symbols ({shown}), around which `tokenizers` cuts otherwise")
    if trainer.eos_id < 0:
        raise InputError(f"{key}: {path} has no piece that ends a document: train it with an eos_id")
    if not rules.escape_whitespaces or trainer.treat_whitespace_as_suffix:
        raise InputError(f"{key}: {path} has white space at the ends of words or unescaped, which isn't converted")

    made = _model_of(proto)
    steps = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        ends = normalizers.Replace(Regex(r"\A +| +\z"), "")  # not Strip, which would also remove other white space
        steps += [ends, normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps += [normalizers.Prepend(SPACE)]
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if not any(SPACE in one.piece[1:] for one in proto.pieces):
        made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    first = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *first])
    names = {"unk_token": trainer.unk_id, "bos_token": trainer.bos_id, "eos_token": trainer.eos_id}
    names["pad_token"] = trainer.pad_id
    _save(made, folder, {name: proto.pieces[number].piece for name, number in names.items() if number >= 0})


def _model_of(proto: Any) -> Tokenizer:
    from tokenizers import Tokenizer, models
    from transformers.convert_slow_tokenizer import generate_merges

    trainer = proto.trainer_spec
    scores = [(one.piece, one.score) for one in proto.pieces]
    if trainer.model_type == UNIGRAM:
        return Tokenizer(models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback))
    numbers = {piece: number for number, (piece, _) in enumerate(scores)}
    return Tokenizer(
        models.BPE(
            numbers,
            generate_merges(numbers, scores),
            unk_token=proto.pieces[trainer.unk_id].piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )


def from_tiktoken(path: str, folder: str | Path, pattern: str, special_tokens: int, tokens: int) -> None:
    """Convert TikTokenizer's JSON.

    Special tokens have the first ids, followed by as many ranks as there is room for.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    ranks = {token: special_tokens + rank for rank, token in enumerate(_ranked(path)[: tokens - special_tokens])}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    special = [*SPECIAL_TOKENS, *(f"<SPECIAL_{number}>" for number in range(len(SPECIAL_TOKENS), special_tokens))]
    numbers = dict(zip(special, range(special_tokens), strict=True))
    numbers |= {spelled(token): number for token, number in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in _merges(ranks)]
    made = Tokenizer(models.BPE(numbers, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    _save(made, folder, {**names, "mask_token": "<mask>", "cls_token": "<cls>", "sep_token": "<sep>"})


def _merges(ranks: Mapping[bytes, int]) -> Sequence[tuple[bytes, bytes]]:
    """Merges in the order of the resulting tokens; for the same token, pairs of lower ranks first."""
    found = []
    for token, rank in ranks.items():
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        found += [(rank, ranks[left], ranks[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(found)]


def _save(made: Tokenizer, folder: str | Path, names: Mapping[str, str]) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(str(folder))
