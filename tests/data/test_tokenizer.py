"""Training, finding and loading of tokenizers."""

import json

import made
import pytest

from megaboa.data import tokenizer
from megaboa.errors import InputError
from megaboa.files import folder_digests, write_json
from megaboa.records import FrozenTokenizer, Tokenizer, write

TEXTS = [f"def function_{number}(value):\n    return value + {number}\n" for number in range(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    assert tokenizer.train(TEXTS, 300, folder) == 300
    return folder


def test_any_text_survives_encoding_and_decoding(trained):
    words = tokenizer.load(tokenizer.find(trained))
    for text in ["def function_7(value):\n", "Grüße, 世界 🐍\t\x00", " two  spaces "]:
        assert words.decode(words(text)["input_ids"]) == text


def test_it_has_an_end_of_text_token_that_plain_text_never_yields(trained):
    words = tokenizer.load(tokenizer.find(trained))
    assert (len(words), words.eos_token, words.pad_token) == (300, tokenizer.END_OF_TEXT, tokenizer.PAD)
    assert words.eos_token_id != words.pad_token_id
    assert words.eos_token_id not in words(TEXTS[0])["input_ids"]


def test_the_same_texts_give_the_same_files(trained, tmp_path):
    tokenizer.train(iter(TEXTS), 300, tmp_path)
    assert folder_digests(tmp_path) == folder_digests(trained)
    assert tokenizer.find(tmp_path).digest == tokenizer.find(trained).digest


def test_a_text_that_is_too_short_yields_fewer_tokens(tmp_path):
    assert tokenizer.train(["ab"], 300, tmp_path) < 300


def test_the_digest_ignores_what_does_not_touch_tokens(trained, tmp_path):
    for path in trained.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = tokenizer.find(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer.find(tmp_path) == before
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": tokenizer.PAD}))
    assert tokenizer.find(tmp_path).digest != before.digest


def test_vocabularies_agree_if_no_id_has_two_meanings(trained):
    words = tokenizer.vocabulary(trained / tokenizer.FILE)
    assert len(words) == 300 and words[tokenizer.END_OF_TEXT] == 0
    assert tokenizer.contradiction(words, {**words, "<new>": 300}) is None
    assert tokenizer.contradiction({**words, "<new>": 300}, words) is None
    other = {**words, "<other>": 0}
    del other[tokenizer.END_OF_TEXT]
    assert tokenizer.contradiction(words, other) == "token 0 is '<|endoftext|>' in one, and '<other>' in the other"


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"type": "BPE", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}, 1),
        ({"type": "BPE", "vocab": {"a": 0}, "unk_token": None}, None),
        ({"type": "BPE", "vocab": {"a": 0}, "unk_token": ""}, None),
        ({"type": "Unigram", "vocab": [["<s>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]], "unk_id": 2}, 2),
        ({"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}, None),
        ({"type": "BPE", "vocab": {"a": 0, "<end>": 9}, "unk_token": "<end>"}, None),  # ends documents, too
    ],
)
def test_the_token_for_unknown_text(tmp_path, model, found):
    write_json(tmp_path / "t.json", {"model": model, "added_tokens": []})
    frozen = FrozenTokenizer(path="t", digest="1", file=str(tmp_path / "t.json"), size=10, eos=9, bos=None)
    assert tokenizer.unknown(frozen) == found


def test_a_corpus_whose_text_is_unknown_is_warned_of():
    known, lost = (made.dataset(tokens=100, unknown=count) for count in (1, 2))
    assert tokenizer.unknown_tokens("c", made.corpus(known)) is None
    assert "corpus 'c': 2.0% of its tokens stand for text" in tokenizer.unknown_tokens("c", made.corpus(lost))
    assert tokenizer.unknown_tokens("c", made.corpus()) is None


def test_a_folder_without_a_tokenizer(tmp_path):
    assert tokenizer.find(tmp_path) is None


def test_references(trained, tmp_path):
    found = tokenizer.find(trained)
    write(tmp_path / "tokenizer.json", Tokenizer(name="bpe", path=found.path, digest=found.digest, vocab_size=300))
    write(tmp_path / "source.json", made.source(tokenizer=found.path, tokenizer_digest=found.digest))
    for reference in (
        {"kind": "manifest", "manifest": str(tmp_path / "tokenizer.json")},
        {"kind": "model", "manifest": str(tmp_path / "source.json")},
        {"kind": "path", "path": str(trained)},
    ):
        assert tokenizer.resolve(reference, "corpora.c.tokenizer") == found


def test_a_reference_that_leads_nowhere_names_its_key(tmp_path):
    write(tmp_path / "source.json", made.source())
    with pytest.raises(InputError, match=r"corpora\.c\.tokenizer: model 'm' comes without a tokenizer"):
        tokenizer.resolve({"kind": "model", "manifest": str(tmp_path / "source.json")}, "corpora.c.tokenizer")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"corpora\.c\.tokenizer: there are no tokenizer files"):
        tokenizer.resolve({"kind": "path", "path": str(tmp_path / "empty")}, "corpora.c.tokenizer")
    with pytest.raises(InputError, match=r"corpora\.c\.tokenizer: .*neither an existing folder nor a Hugging Face id"):
        tokenizer.resolve({"kind": "path", "path": "./not/a/folder"}, "corpora.c.tokenizer")
