"""Text to token ids: gigatoken and tokenizers, what stands around a document, and the gate."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import TEXTS, build, jsonl, make, sentences, specification
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megaboa.data import encoder as encoders
from megaboa.data import tokenizer
from megaboa.data.encoder import GATE_CHARACTERS, Encoder, Gate, surround
from megaboa.errors import InputError


def frozen(fast, folder):
    fast.save_pretrained(str(folder))
    found = tokenizer.find(folder)
    return tokenizer.freeze(found, tokenizer.load(found), folder / "frozen.json")


def words(*special, template=None, unknown="<unk>"):
    """A tokenizer of whole words, which gigatoken doesn't take."""
    vocabulary = {word: number for number, word in enumerate([*special, "<unk>", "wort", "Satz", "a"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        made.post_processor = processors.TemplateProcessing(
            template, special_tokens=[(s, vocabulary[s]) for s in special]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def bos(bpe, tmp_path_factory):
    """A tokenizer that puts a BOS token before a text and another after it."""
    fast = PreTrainedTokenizerFast.from_pretrained(str(bpe))
    fast.add_special_tokens({"bos_token": "<s>", "sep_token": "</s>"})
    special = [(token, fast.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    return frozen(fast, tmp_path_factory.mktemp("bos"))


def test_gigatoken_takes_byte_level_bpe(encoder):
    assert encoder.name.startswith("gigatoken ") and encoder.refused is None


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_gigatoken_equals_tokenizers(encoder, loaded, texts):
    slow, parallel = Encoder(loaded, True, None, "tokenizers"), Encoder(loaded, True, None, threads=2)
    reference = slow.encode(texts)
    for fast in (encoder.encode(texts), parallel.encode(texts)):
        assert fast.ids.tolist() == reference.ids.tolist() and fast.lengths.tolist() == reference.lengths.tolist()
    assert reference.ids.tolist() == [token for text in texts for token in slow.expected(text)]


@pytest.mark.parametrize("model", ["WordLevel", "Unigram"])
def test_a_tokenizer_that_gigatoken_refuses_falls_back_and_the_manifest_says_so(tmp_path, model):
    fast = words()
    if model == "Unigram":
        pieces = [("<unk>", 0.0), *((letter, -2.0) for letter in " Satzworümeäö:"), ("wort", -1.0)]
        fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(pieces, 0, False)))
    loaded = frozen(fast, tmp_path / "t")
    encoder = Encoder(loaded, False, None)
    assert encoder.name.startswith("tokenizers ") and encoder.refused
    with pytest.raises(
        InputError, match=r"corpora\.c\.encoder: gigatoken doesn't take this tokenizer .*; remove the key"
    ):
        Encoder(loaded, False, None, "gigatoken", "corpora.c")
    spec = specification(tmp_path, jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "t", append_eod=False)
    manifest = make(spec, 2)
    assert manifest.encoders == (encoder.name,) and manifest.refused == encoder.refused
    assert manifest.documents == len(TEXTS)


def test_ids_above_the_size_of_a_vocabulary_with_gaps_are_never_cut_down(tmp_path):
    made = Tokenizer(models.WordLevel({"<unk>": 0, "small": 1, "large": 70_000}, unk_token="<unk>"))
    encoder = Encoder(frozen(PreTrainedTokenizerFast(tokenizer_object=made), tmp_path / "t"), False, False)
    assert (encoder.vocab_size, encoder.dtype) == (3, np.uint16)
    _, files = build(tmp_path / "fits", [jsonl(tmp_path / "a.jsonl", ["small"])], encoder)
    assert files["c.bin"] == np.array([1], "<u2").tobytes()
    with pytest.raises(ValueError, match="token id 70000 does not fit uint16"):
        build(tmp_path / "refused", [jsonl(tmp_path / "b.jsonl", ["small", "large"])], encoder)


def test_a_tokenizer_that_refuses_to_encode_is_one_sentence_that_shows_the_document(tmp_path):
    made = Tokenizer(models.WordLevel({"wort": 0, "Satz": 1}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = Encoder(
        frozen(PreTrainedTokenizerFast(tokenizer_object=made), tmp_path / "t"), False, False, key="corpora.c"
    )
    assert encoder.encode(["wort", "Satz wort"]).ids.tolist() == [0, 1, 0]
    said = r"corpora\.c\.tokenizer: tokenizers \S+ can't encode the document that begins with 'Satz fremd' \(.*UNK"
    with pytest.raises(InputError, match=said):
        build(tmp_path, [jsonl(tmp_path / "a.jsonl", ["wort", "Satz fremd", "wort"])], encoder)


def test_no_document_is_to_blame_where_nothing_can_be_encoded(tmp_path, monkeypatch):
    """As after Ctrl-C in the midst of the library's imports."""
    made = Tokenizer(models.WordLevel({"some": 0, "text": 1}, unk_token="some"))
    encoder = Encoder(frozen(PreTrainedTokenizerFast(tokenizer_object=made), tmp_path / "t"), False, False, key="c")

    def broken(texts):
        raise AttributeError("'list' object has no attribute 'dtype'")

    monkeypatch.setattr(encoder, "_plain", broken)
    with pytest.raises(AttributeError, match="dtype"):
        encoder.encode(["some text"])


def test_an_error_that_no_document_causes_is_told_as_it_is(loaded, monkeypatch):
    encoder = Encoder(loaded, False, None)
    alone = encoder._plain

    def plain(texts):
        if len(texts) > 1:
            raise AttributeError("no such attribute")
        return alone(texts)

    monkeypatch.setattr(encoder, "_plain", plain)
    with pytest.raises(AttributeError, match="no such attribute"):
        encoder.encode(["a", "b"])


def test_end_of_document_is_appended_on_demand(loaded):
    plain = Encoder(loaded, False, None).encode(["a", "b c"])
    ended = Encoder(loaded, True, None).encode(["a", "b c"])
    assert ended.lengths.tolist() == [length + 1 for length in plain.lengths]
    assert ended.ids[np.cumsum(ended.lengths) - 1].tolist() == [loaded.eos] * 2


@pytest.mark.parametrize("kind", ["auto", "tokenizers"])
@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize(
    ("prepend_bos", "before", "after"), [(None, ["bos"], ["sep"]), (True, ["bos"], []), (False, [], [])]
)
def test_what_stands_around_a_document(bos, kind, append_eod, prepend_bos, before, after):
    encoder = Encoder(bos, append_eod, prepend_bos, kind)
    special = {"bos": bos.bos, "sep": encoder.reference.token_to_id("</s>"), "eos": bos.eos}
    text = "Satz wort"
    plain = encoder.reference.encode(text, add_special_tokens=False).ids
    around = [special[n] for n in before], [special[n] for n in [*after, *(["eos"] if append_eod else [])]]
    assert encoder.encode([text, text]).ids.tolist() == 2 * [*around[0], *plain, *around[1]]
    assert (encoder.prefix, encoder.suffix) == around
    encoder.require_equal(text, lambda: "here")
    assert encoder.decode(plain) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((True, None), r"corpora\.c\.append_eod is true, .* has no EOS"),
        ((False, True), r"prepend_bos is true, .* no BOS"),
    ],
)
def test_a_special_token_that_a_tokenizer_lacks_is_named(tmp_path, options, said):
    loaded = frozen(words(), tmp_path)
    with pytest.raises(InputError, match=said):
        Encoder(loaded, *options, key="corpora.c")
    assert Encoder(loaded, False, None).encode(["wort"]).ids.tolist() == [1]


def letters(known, folder):
    """A tokenizer of single letters that makes nothing of all others, and puts <s> before a text."""
    made = Tokenizer(models.BPE({"<s>": 0, **{letter: 1 + n for n, letter in enumerate(known)}}, []))
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return frozen(PreTrainedTokenizerFast(tokenizer_object=made), folder)


def test_what_a_tokenizer_puts_around_is_found_where_it_does_not_know_a(tmp_path):
    encoder = Encoder(letters("12", tmp_path), False, None)
    assert (encoder.prefix, encoder.suffix) == ([0], [])
    assert encoder.encode(["1a2"]).ids.tolist() == [0, 1, 2]


def test_a_tokenizer_that_knows_no_common_text_must_be_told(tmp_path):
    loaded = letters("ҘҚ", tmp_path)
    with pytest.raises(InputError, match=r"corpora\.c\.tokenizer .*set `prepend_bos`"):
        Encoder(loaded, False, None, key="corpora.c")
    assert Encoder(loaded, False, False).encode(["ҘҚ"]).ids.tolist() == [1, 2]


def test_documents_of_which_a_tokenizer_makes_nothing_are_left_out_and_counted(tmp_path):
    encoder = Encoder(letters("12", tmp_path), False, False)
    path = jsonl(tmp_path / "a.jsonl", ["12", "xyz", "1", "xyz", "1"])
    for shards in (1, 3):
        facts, files = build(tmp_path / "all", [path], encoder, shards)
        assert files["c.bin"] == np.array([1, 2, 1, 1], "<u2").tobytes()
        assert facts.datasets[0].dropped == {"untokenizable": 2}
        assert facts.datasets[0].by_file == ((0, 3),)
    facts, files = build(tmp_path / "once", [path], encoder, deduplicate=True)
    assert files["c.bin"] == np.array([1, 2, 1], "<u2").tobytes()
    assert facts.datasets[0].dropped == {"duplicate": 2, "untokenizable": 1}


class Liar:
    """gigatoken, but wrong where a text holds a certain word."""

    def __init__(self, fast, word):
        self._fast, self._word = fast, word

    def encode(self, text):
        return self._fast.encode(text.replace(self._word, "x"))


@pytest.mark.parametrize("word", ["Nummer 7:", "Nummer 42:"])
def test_the_gate_stops_an_encoder_that_lies_and_names_the_document(loaded, tmp_path, word):
    liar = Encoder(loaded, True, None, key="corpora.c")
    liar._fast = Liar(liar._fast, word)
    path = jsonl(tmp_path / "a.jsonl", TEXTS)
    line = next(number for number, text in enumerate(TEXTS, start=1) if word in text)
    said = (
        rf"a\.jsonl:{line}: gigatoken .* and tokenizers .* differ at token \d+; set corpora\.c\.encoder to `tokenizers`"
    )
    with pytest.raises(InputError, match=said):
        build(tmp_path, [path], liar)


def test_the_gate_looks_at_the_first_documents_and_at_some_of_the_others(encoder):
    gate, looked = Gate(encoder, 10 * GATE_CHARACTERS, "seed"), []
    for number in range(3000):
        if gate.wants():
            gate.check("some text " * 60, lambda: "here")
            looked.append(number)
    assert looked[:20] == list(range(20)) and 100 < len(looked) < 1000 and looked[-1] > 1500
    assert gate.documents == len(looked) and gate.characters <= 3 * GATE_CHARACTERS


def test_of_a_long_document_the_beginning_is_compared(encoder):
    gate = Gate(encoder, 1, "seed")
    for _ in range(encoders.FIRST):
        gate.check("ä" * 1_000_000, lambda: "here")
    assert gate.characters == encoders.FIRST * encoders.FIRST_LONGEST < encoders.GATE_CHARACTERS
    gate.check("ä" * 1_000_000, lambda: "here")
    assert gate.characters == encoders.FIRST * encoders.FIRST_LONGEST + encoders.GATE_LONGEST


@given(st.lists(st.lists(st.integers(5, 9), max_size=4), max_size=6), st.lists(st.just(1), max_size=2), st.just([2, 3]))
def test_the_same_tokens_stand_around_every_document(documents, prefix, suffix):
    found = surround([np.array(ids, np.uint32) for ids in documents], prefix, suffix, np.dtype(np.uint16))
    assert found.ids.dtype == np.uint16
    expected = [[*prefix, *ids, *suffix] for ids in documents]
    assert found.ids.tolist() == list(itertools.chain(*expected)) and found.lengths.tolist() == [
        len(ids) for ids in expected
    ]


def test_gigatoken_equals_tokenizers_on_long_and_mixed_text(encoder):
    chance = random.Random(1)
    for _ in range(20):
        text = "".join(chance.choices([*sentences(30), *encoders.HARD_TEXTS], k=30))
        encoder.require_equal(text, lambda: "here")
