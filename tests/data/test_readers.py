"""Records of files of lines and of text, from where a part begins to where it ends."""

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from making import jsonl, packed

from megaboa.data import readers, sources
from megaboa.data.documents import Bad, Format
from megaboa.data.readers import Records, describe, documents, split
from megaboa.data.shards import Part, divide
from megaboa.errors import InputError


def file_of(path):
    return sources.file_of(path, *sources.kind_of(path))


def read(path, shards=1, **form):
    """What the parts of a file give, one after the other."""
    form, file = Format(**form), file_of(path)
    parts = [part for shard in divide([file], shards, form.separator) for part in shard]
    return [record for part in parts for record in Records(file, part, form)]


def texts(path, **form):
    return [found if isinstance(found, Bad) else found[0] for _, found in read(path, **form)]


LINE = st.one_of(
    st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\0"), max_size=12),
    st.sampled_from(["", "\r", "ab\r", " ", "世界" * 9]),
)


@given(st.lists(LINE, max_size=20), st.booleans(), st.integers(1, 9))
@example(["", "a"], False, 3)
def test_every_line_belongs_to_exactly_one_part(tmp_path_factory, lines, ends, shards):
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes("\n".join(lines).encode() + b"\n" * ends)
    whole, cut = read(path, separator="\n"), read(path, shards, separator="\n")
    assert whole == cut
    assert [found[0] for _, found in whole if found[0]] == [line for line in lines if line]


@given(st.text("ab-x", max_size=60), st.sampled_from(["-", "--", "-x", "a-b", "aba", "abx-"]), st.integers(1, 9))
@example("a---b", "--", 2)
def test_every_text_between_separators_belongs_to_exactly_one_part(tmp_path_factory, text, separator, shards):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text)
    found = [texts[0] for _, texts in read(path, shards, separator=separator)]
    expected = text.split(separator)
    assert found == (expected if expected[-1] else expected[:-1])


@given(st.binary(max_size=80).map(lambda b: bytes(b"ab\n-"[n % 4] for n in b)), st.integers(1, 7), st.integers(0, 12))
def test_how_much_is_read_at_once_changes_nothing(content, chunk, limit):
    before, readers.CHUNK = readers.CHUNK, chunk
    try:
        small = list(split(io.BytesIO(content), b"-\n", 0, limit))
    finally:
        readers.CHUNK = before
    assert small == list(split(io.BytesIO(content), b"-\n", 0, limit))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson", "a.json"])
def test_json_lines_plain_and_packed(tmp_path, name):
    content = b'{"text": "one"}\r\n\n  \r\n{"text": "zwei\\nZeilen", "id": NaN}\n\xef\xbb\xbf{"text": "3 \\u0000"}'
    assert texts(packed(tmp_path / name, content)) == ["one", "zwei\nZeilen", "3 \0"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize(("separator", "expected"), [(None, ["ä\n\n\n世"]), ("\n\n", ["ä", "\n世"])])
def test_text_plain_and_packed(tmp_path, name, separator, expected):
    assert texts(packed(tmp_path / name, "ä\n\n\n世".encode()), separator=separator) == expected


def test_packed_files_of_several_frames_are_read_to_the_end(tmp_path):
    for end in ("gz", "zst"):
        one = packed(tmp_path / f"a.jsonl.{end}", b'{"text": "1"}\n').read_bytes()
        other = packed(tmp_path / f"a.jsonl.{end}", b'{"text": "2"}\n').read_bytes()
        (tmp_path / f"a.jsonl.{end}").write_bytes(one + other)
        assert texts(tmp_path / f"a.jsonl.{end}") == ["1", "2"]


def test_keys_may_be_nested_or_hold_dots(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"a": {"b": "nested"}}, {"a.b": "dotted", "a": {"b": "nested"}}])
    assert texts(path, keys=("a.b",)) == ["nested", "dotted"]
    path = jsonl(tmp_path / "a.jsonl", [{"q": "Q", "a": {"b": "A"}}])
    assert read(path, keys=("q", "a.b")) == [(0, ["Q", "A"])]


BAD_LINES = [
    (b'{"text": "cut off', "not a line of JSON"),
    (b"[" * 100_000, "not a line of JSON"),
    (b'["text"]', "a JSON list, where an object with the key 'text' is needed"),
    (b'{"content": "x", "id": 1}', "no key 'text'; set the corpus's `text_key` to one of ['content', 'id']"),
    (b'{"text": 5}', "'text' holds int, not a string"),
    (b'{"text": null}', "'text' holds NoneType"),
    (b'{"text": "gr\xfcn"}', "not a line of JSON"),
    (b'{"text": "\\ud83d"}', "half a character (a lone surrogate)"),
    (b'{"text": "\xed\xa0\xbd"}', "half a character (a lone surrogate)"),
    (b"\0" * 40, "not a line of JSON"),
    (b'\0\0\0{"text": "a"}', "not a line of JSON"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_handed_on_and_named(tmp_path, name, line, said):
    path = jsonl(tmp_path / name, ["good", line, "good too"])
    records = read(path)
    assert [found for _, found in records if not isinstance(found, Bad)] == [["good"], ["good too"]]
    position, bad = records[1]
    assert said in bad.reason
    assert describe(file_of(path), position, Format()) == f"{path}:2"


@pytest.mark.parametrize(
    ("content", "said", "where"),
    [
        (b"good-=gr\xfcn-=x", "not UTF-8 text (byte 2)", "byte 6"),
        (b"good-=a\0\0\0-=x", "holds NUL bytes", "byte 6"),
        (b"good-=" + b"x" * 30, "longer than max_document_mb allows", "byte 6"),
    ],
)
def test_a_bad_text_is_handed_on_and_named(tmp_path, content, said, where):
    (tmp_path / "a.txt").write_bytes(content)
    form = Format(separator="-=", max_bytes=20)
    (_, good), (position, bad), *_ = Records(file_of(tmp_path / "a.txt"), Part(0, 0, len(content)), form)
    assert good == ("good",) and said in bad.reason
    assert describe(file_of(tmp_path / "a.txt"), position, form) == f"{tmp_path}/a.txt, {where}"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst"])
def test_what_is_too_long_is_no_record_and_the_next_is_read(tmp_path, name):
    path = jsonl(tmp_path / name, ["a", "long " * 2000, "b"])
    separator = "\n" if ".txt" in name else None
    found = [isinstance(found, Bad) for _, found in read(path, separator=separator, max_bytes=1000)]
    assert found == [False, True, False]
    if separator:
        assert [isinstance(found, Bad) for _, found in read(path, max_bytes=1000)] == [True]


@pytest.mark.parametrize("end", ["gz", "zst"])
@pytest.mark.parametrize("kept", [1, 10, 0.5, -1])
def test_a_packed_file_that_is_cut_short_is_an_error(tmp_path, end, kept):
    path = jsonl(tmp_path / f"a.jsonl.{end}", [f"{n * 7919} text" for n in range(3000)])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(
        InputError, match=rf"a\.jsonl\.{end}: the compressed file is damaged or truncated .*copy it again"
    ):
        read(path)


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_a_packed_file_that_is_none_is_an_error(tmp_path, end):
    path = tmp_path / f"a.jsonl.{end}"
    path.write_bytes(b'{"text": "plain"}\n')
    with pytest.raises(InputError, match="damaged or truncated"):
        read(path)


def test_text_that_is_no_utf8_in_the_standard_library_is_left_out(tmp_path):
    (tmp_path / "a.py").write_bytes(b"gr\xfcn")
    file = sources.file_of(tmp_path / "a.py", "source")
    assert list(Records(file, Part(0, 0, file.size), Format())) == []


def test_the_limit_counts_texts_and_reads_no_further(tmp_path):
    file = file_of(jsonl(tmp_path / "a.jsonl", ["", "1", "2", b"this is not JSON"]))
    assert list(documents([file], Format(), 2)) == ["1", "2"]
    with pytest.raises(InputError, match=r"a\.jsonl:4: not a line.*set corpora\.c\.on_bad_record to `skip`"):
        list(documents([file], Format(), key="corpora.c"))
    assert list(documents([file], Format(), skip_bad=True)) == ["1", "2"]
