"""Tokenizers in the files of others: the same numbers as the libraries that wrote them."""

import base64
import contextlib
import difflib
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from megaboa.config.models import model as config
from megaboa.data import jobs, tokenizer, tokenizer_files
from megaboa.errors import InputError
from megaboa.records import TokenizerSpec

TEXT = "\n".join(Path(module.__file__).read_text() for module in (os, difflib, subprocess))
LINES = [line for line in TEXT.splitlines() if line.strip()]
STRANGE = ["Grüße, 世界 🐍\t", " two  spaces ", "  lead", "x\ny\n\n  z", "１２３ ﬁ e\u0301", "\u200b\u00a0", "a"]
SAMPLES = [*LINES[::7], TEXT[:5000], *STRANGE]
OF_LLAMA = {"byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity"}
MODELS = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "unigram without a first space": {"model_type": "unigram", "add_dummy_prefix": False, "byte_fallback": True},
    "bpe as Llama 2's": {"model_type": "bpe", "remove_extra_whitespaces": False, **OF_LLAMA},
    "bpe with pieces of spaces": {
        "model_type": "bpe", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, **OF_LLAMA
    },
}  # fmt: skip


def made(folder: Path, **files: object) -> tuple[int, object]:
    """Its number of tokens, and it."""
    kind = next(iter(files))
    size = tokenizer_files.size(str(files[kind]), kind, int(files.get("special_tokens", 0)))
    spec = TokenizerSpec(name="t", store=str(folder / "store"), train_on=None, vocab_size=size, **files)
    found = jobs.make_tokenizer(spec)
    assert jobs.make_tokenizer(spec) == found and found.vocab_size == size
    return size, tokenizer.load(tokenizer.find(found.path))


def trained(folder: Path, **options: object) -> Path:
    options = {"model_type": "bpe", "vocab_size": 800, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(folder / "m"), minloglevel=2, **options
    )
    return folder / "m.model"


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    path = trained(folder, **MODELS[request.param])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size, ours = made(folder, sentencepiece=str(path))
    words = tokenizer_files.vocabulary({"sentencepiece": str(path)})
    assert words == {reference.id_to_piece(number): number for number in range(size)}
    assert size == reference.get_piece_size()
    return reference, ours


def test_a_sentencepiece_model_gives_the_same_numbers(both):
    reference, ours = both
    for text in SAMPLES:
        assert ours(text)["input_ids"] == reference.encode(text), text
    assert (ours.eos_token_id, ours.bos_token_id) == (reference.eos_id(), reference.bos_id())
    assert ours.decode(ours("a text")["input_ids"]) == "a text"


@settings(max_examples=150)
@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cf", "Mn", "Mc", "Me"], exclude_characters="<>"), min_size=1)
)
def test_of_any_text(both, text):
    """But what a rule of normalization replaces together with marks that combine with it, in one step or in two."""
    reference, ours = both
    assert ours(text)["input_ids"] == reference.encode(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"user_defined_symbols": ["<sep>"]}, r"has user_defined_symbols \(<sep>\)"),
        ({"eos_id": -1}, "no piece that ends a document"),
        ({"model_type": "char", "vocab_size": 60}, "only unigram and BPE"),
        ({"treat_whitespace_as_suffix": True}, "white space at the ends of words"),
    ],
)
def test_a_model_that_would_cut_text_otherwise_is_refused(tmp_path, options, reason):
    path = trained(tmp_path, **options)
    with pytest.raises(InputError, match=rf"^tokenizers\.t: .*{reason}"):
        made(tmp_path, sentencepiece=str(path))
    assert not list((tmp_path / "store").rglob("tokenizer.json"))


def test_a_model_that_was_cut_off_is_refused(tmp_path):
    """Also between two pieces, where protobuf reads it."""
    whole = trained(tmp_path).read_bytes()
    first = 2 + whole[1]
    for cut in (0, first, first + 3, len(whole) - 1):
        (tmp_path / "m.model").write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"m\.model' is not a (whole )?model of SentencePiece"):
            tokenizer_files.size(str(tmp_path / "m.model"), "sentencepiece")


def ranked(count: int) -> list[dict[str, object]]:
    tokens = [*(bytes([byte]) for byte in range(256)), *(bytes([65, 66, byte]) for byte in range(256))][:count]
    return [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(tokens)]


@pytest.mark.parametrize(
    "listed",
    [
        [],
        {},
        ranked(255),
        ranked(257)[1:],
        [*ranked(256), {"rank": 256}],
        [*ranked(256), {"rank": 256, "token_bytes": 5}],
        [*ranked(256), {"rank": 256, "token_bytes": "?"}],
        [*ranked(256), {"rank": 256, "token_bytes": "QQ=="}],
    ],
)
def test_what_tiktokenizer_would_not_read_is_refused(tmp_path, listed):
    (tmp_path / "v.json").write_text(json.dumps(listed))
    with pytest.raises(InputError, match=r"v\.json' is not what TikTokenizer reads"):
        tokenizer_files.size(str(tmp_path / "v.json"), "tiktoken", 20)


def test_how_many_tokens_of_tiktoken_count(tmp_path):
    """As many as are asked for, with the special ones; by default as many as Megatron takes."""
    (tmp_path / "v.json").write_text(json.dumps(ranked(300)))
    asked = {"tiktoken": str(tmp_path / "v.json"), "tiktoken_num_special_tokens": 20}
    assert config.Tokenizer(**asked).size == 320
    assert config.Tokenizer(**asked, vocab_size=300).size == 300
    with pytest.raises(ValueError, match="vocab_size must be 276 or more"):
        config.Tokenizer(**asked, vocab_size=275)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken_gives_the_numbers_of_megatrons_own(tmp_path, pattern):
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    with contextlib.redirect_stdout(io.StringIO()):
        ranks = bpe_train(TEXT[:30000], vocab_size=400, pat_str=tokenizer_files.PATTERNS["v2"], visualise=None)
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for token, rank in sorted(ranks.items(), key=lambda one: one[1])
    ]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(listed))
    size, ours = made(tmp_path, tiktoken=str(path), pattern=pattern, special_tokens=20)
    reference = TikTokenTokenizer(str(path), num_special_tokens=20, pattern=pattern, vocab_size=size)
    assert size == 420
    for text in SAMPLES:
        assert ours(text)["input_ids"] == reference.text_to_ids(text), text
    assert (ours.eos_token_id, ours.pad_token_id) == (reference.eos_id, reference.pad_id)
    assert ours.convert_ids_to_tokens([7, 19]) == ["<SPECIAL_7>", "<SPECIAL_19>"]


def test_gpt2s_two_files_give_the_same_tokens(tmp_path):
    """As Megatron's --vocab-file and --merge-file name them."""
    tokenizer.train(LINES, 300, tmp_path / "bpe")
    model = json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    files = {"vocab": str(tmp_path / "gpt2-vocab.json"), "merges": str(tmp_path / "gpt2-merges.txt")}
    spec = TokenizerSpec(name="gpt2", store=str(tmp_path / "store"), train_on=None, vocab_size=300, **files)
    made_of_files = jobs.make_tokenizer(spec)
    words = tokenizer.load(tokenizer.find(made_of_files.path))
    reference = tokenizer.load(tokenizer.find(tmp_path / "bpe"))
    for text in [LINES[3], "Grüße, 世界 🐍\t", " two  spaces "]:
        assert words(text)["input_ids"] == reference(text)["input_ids"]
    assert (made_of_files.vocab_size, words.eos_token) == (300, tokenizer.END_OF_TEXT)
    assert jobs.make_tokenizer(spec) == made_of_files


def test_other_files_are_not_gpt2s(tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}" if name == "vocab.json" else "one two three four\n")
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    spec = TokenizerSpec(name="gpt2", store=str(tmp_path / "store"), train_on=None, vocab_size=1, **files)
    with pytest.raises(InputError, match=r"^tokenizers.gpt2: .*vocab.json and .*merges.txt"):
        jobs.make_tokenizer(spec)
    assert not list((tmp_path / "store").rglob("tokenizer.json"))
