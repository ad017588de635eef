"""Rows of Parquet and Arrow files."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaboa.data.documents import Bad, Format
from megaboa.data.readers import Records, describe
from megaboa.data.shards import divide
from megaboa.data.sources import file_of, kind_of
from megaboa.errors import InputError

TEXTS = [f"row {number} ä" for number in range(2500)]


def parquet(path, table, **options):
    pyarrow.parquet.write_table(table, path, **options)
    return path


def arrow(path, table):
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return path


def stream(path, table):
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    return path


def read(path, shards=1, keys=("text",)):
    file = file_of(path, *kind_of(path))
    parts = [part for shard in divide([file], shards, None) for part in shard]
    return [record for part in parts for record in Records(file, part, Format(keys))]


WRITERS = [
    pytest.param(parquet, "parquet", id="parquet"),
    pytest.param(arrow, "arrow", id="arrow"),
    pytest.param(stream, "arrow", id="arrow-stream"),
]


@pytest.mark.parametrize(("write", "end"), WRITERS)
@pytest.mark.parametrize("shards", [1, 2, 7])
def test_every_row_is_read_once_and_in_order(tmp_path, write, end, shards):
    path = write(tmp_path / f"a.{end}", pyarrow.table({"id": list(range(2500)), "text": TEXTS}))
    assert read(path, shards) == [(number, [text]) for number, text in enumerate(TEXTS)]


@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=5), max_size=30),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_row_groups_and_shards_change_nothing(tmp_path_factory, texts, group, shards):
    path = tmp_path_factory.mktemp("p") / "a.parquet"
    parquet(path, pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), row_group_size=group)
    assert [found for _, found in read(path, shards)] == [[text] for text in texts]


@pytest.mark.parametrize(("write", "end"), WRITERS)
def test_columns_may_be_nested_several_binary_or_large(tmp_path, write, end):
    columns = {
        "a": [{"b": "nested"}],
        "x.y": ["dotted"],
        "bytes": pyarrow.array(["ä".encode()]),
        "large": pyarrow.array(["large"], pyarrow.large_string()),
        "coded": pyarrow.array(["coded"]).dictionary_encode(),
    }
    path = write(tmp_path / f"a.{end}", pyarrow.table(columns))
    keys = ("a.b", "x.y", "bytes", "large", "coded")
    assert read(path, keys=keys) == [(0, ["nested", "dotted", "ä", "large", "coded"])]


def invalid(*values):
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


@pytest.mark.parametrize(("write", "end"), WRITERS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_bad_row_is_handed_on_and_named(tmp_path, write, end, nested):
    column = invalid(b"good", b"gr\xfcn", None, b"good too")
    column = pyarrow.StructArray.from_arrays([column], ["t"]) if nested else column
    path = write(tmp_path / f"a.{end}", pyarrow.table({"text": column}))
    key = "text.t" if nested else "text"
    found = [texts for _, texts in read(path, keys=(key,))]
    assert [texts for texts in found if not isinstance(texts, Bad)] == [["good"], ["good too"]]
    assert "not UTF-8 text (byte 2)" in found[1].reason and "NoneType, not a string" in found[2].reason
    assert describe(file_of(path, *kind_of(path)), 1, Format()) == f"{path}, row 1"


def test_bytes_that_are_no_text_are_bad(tmp_path):
    path = parquet(tmp_path / "a.parquet", pyarrow.table({"text": pyarrow.array([b"\xff"], pyarrow.binary())}))
    assert read(path) == [(0, Bad("'text' is not UTF-8 text (byte 0)"))]


def test_a_missing_column_is_an_error_that_names_the_others(tmp_path):
    path = parquet(tmp_path / "a.parquet", pyarrow.table({"content": ["x"], "id": [1]}))
    with pytest.raises(InputError, match=r"a\.parquet: no column 'text'; .*text_key` to one of \['content', 'id'\]"):
        read(path)


@pytest.mark.parametrize(("write", "end"), WRITERS)
def test_a_table_that_is_cut_short_is_an_error(tmp_path, write, end):
    path = write(tmp_path / f"a.{end}", pyarrow.table({"text": TEXTS}))
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(InputError, match=rf"a\.{end}: (not a readable|can't be read)"):
        read(path)


def test_what_datasets_saves_is_read(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "d", num_shards=2)
    found = [texts for path in sorted((tmp_path / "d").glob("*.arrow")) for _, texts in read(path, 3)]
    assert found == [[text] for text in TEXTS]
