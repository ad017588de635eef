"""Archives: the same bytes for the same files, and nothing strange out of them."""

import random
import zipfile

import pytest

from megaboa.bundle.archive import pack, unpack, write
from megaboa.data.errors import InputError


def test_the_same_files_in_another_order_are_the_same_archive(tmp_path):
    files = {"b/ä.txt": b"two", "a.txt": b"one" * 1000}
    content = pack(files)
    assert content == pack(dict(reversed(files.items())))
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    assert unpack(path) == files
    write(files, tmp_path / "out")
    assert (tmp_path / "out" / "b" / "ä.txt").read_bytes() == b"two"


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "a\\b"])
def test_an_archive_that_would_leave_its_folder_is_refused(tmp_path, name):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    if "\\" in name:  # zipfile itself would turn it into a slash on other systems
        assert name in zipfile.ZipFile(path).namelist()
    with pytest.raises(InputError, match="outside of its folder"):
        unpack(path)


def test_a_torn_archive_and_one_that_is_not_there_are_named(tmp_path):
    path = tmp_path / "x.zip"
    noise = random.Random(0).randbytes(5000)
    path.write_bytes(pack({"a": noise})[:2000])
    with pytest.raises(InputError, match=r"x\.zip: is no whole zip file"):
        unpack(path)
    content = bytearray(pack({"a": noise}))
    content[600] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.zip: is no whole zip file"):
        unpack(path)
    with pytest.raises(InputError, match=r"y\.zip: there is no such file"):
        unpack(tmp_path / "y.zip")
