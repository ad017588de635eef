"""A tokenizer for all tests of corpora."""

import pytest
from making import TEXTS, sentences

from megaboa.data import tokenizer
from megaboa.data.encoder import Encoder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train([*TEXTS, *sentences(100)], 300, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(bpe):
    found = tokenizer.find(bpe)
    return tokenizer.freeze(found, tokenizer.load(found), bpe.parent / "frozen.json")


@pytest.fixture(scope="session")
def encoder(loaded):
    return Encoder(loaded, True, None)
