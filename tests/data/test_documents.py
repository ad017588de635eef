"""The texts of a record, and records without any."""

import pytest
from making import specification

from megaboa.data.documents import Bad, Format, decode, line_reader, text_getter


@pytest.mark.parametrize(("key", "keys"), [("text", ("text",)), (["q", "a.b"], ("q", "a.b"))])
def test_the_format_of_a_specification(key, keys):
    asked = specification("", "", "", text_key=key, separator="\n", max_document_mb=3)
    assert Format.of(asked) == Format(keys, "\n", 3 << 20)


def test_text_is_utf8_without_nul_bytes():
    assert decode("ä世".encode()) == ("ä世",)
    assert decode(b"a\xff") == Bad("not UTF-8 text (byte 1)")
    assert "NUL bytes" in decode(b"a\0\0").reason


def test_numbers_that_json_does_not_know_are_read_as_python_reads_them():
    texts = line_reader(Format())
    assert texts(b'{"text": "a", "score": NaN, "big": 123456789012345678901234567890}') == ["a"]
    assert "lone surrogate" in texts(b'{"text": "\\ud800", "score": NaN}').reason


@pytest.mark.parametrize("score", [b"1", b"NaN"])
def test_a_line_with_a_text_that_is_too_long_is_refused_by_its_bytes(score):
    texts = line_reader(Format(max_bytes=1 << 20))
    for text, fits in (("a" * (1 << 20), True), ("ä" * (1 << 19), True), ("ä" * (1 << 19) + "a", False)):
        found = texts(b'{"text": "%s", "score": %s}' % (text.encode(), score))
        assert found == ([text] if fits else Bad("longer than max_document_mb allows (1 MiB)"))


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"a": {"b": {"c": "x"}}}, ["x"]),
        ({"a.b.c": "y", "a": 1}, ["y"]),
        ({"a": {"b.c": "z"}}, None),
        ({"a": "b"}, None),
    ],
)
def test_nested_keys(record, found):
    texts = text_getter(Format(("a.b.c",)))(record)
    assert texts == found if found else isinstance(texts, Bad)


def test_a_key_of_a_record_that_is_half_a_character_can_be_shown():
    assert text_getter(Format())({"\ud800": 1}).reason.encode()


def test_a_text_that_is_too_long_is_refused_by_its_bytes():
    texts = text_getter(Format(max_bytes=1 << 20))
    assert texts({"text": "a" * (1 << 20)}) == ["a" * (1 << 20)]
    assert texts({"text": "ä" * (1 << 19) + "a"}) == Bad("longer than max_document_mb allows (1 MiB)")


def test_of_many_keys_some_are_named():
    assert len(text_getter(Format())({f"key{number}": 1 for number in range(1000)}).reason) < 500
