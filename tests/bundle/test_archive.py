"""Archives: the same bytes for the same files, and nothing strange out of them."""

import random
import stat
import zipfile

import pytest

from megaboa.bundle import archive as archive_module
from megaboa.bundle.archive import Archive, pack
from megaboa.errors import InputError


def test_the_same_files_in_another_order_are_the_same_archive(tmp_path):
    files = {"b/ä.txt": b"two", "a.txt": b"one" * 1000}
    content = pack(files)
    assert content == pack(dict(reversed(files.items())))
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    assert Archive(path) == files
    Archive(path).unpack(files, tmp_path / "out")
    assert (tmp_path / "out" / "b" / "ä.txt").read_bytes() == b"two"


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "a\\b", "a/./b", "a//b", "."])
def test_an_archive_that_would_leave_its_folder_is_refused(tmp_path, name):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    if "\\" in name:  # zipfile itself would turn it into a slash on other systems
        assert name in zipfile.ZipFile(path).namelist()
    with pytest.raises(InputError, match="outside of its folder"):
        Archive(path)


def test_a_torn_archive_and_one_that_is_not_there_are_named(tmp_path):
    path = tmp_path / "x.zip"
    noise = random.Random(0).randbytes(5000)
    path.write_bytes(pack({"a": noise})[:2000])
    with pytest.raises(InputError, match=r"x\.zip: is a corrupt or truncated zip file"):
        Archive(path)
    content = bytearray(pack({"a": noise}))
    content[600] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.zip: is a corrupt or truncated zip file"):
        Archive(path)["a"]
    with pytest.raises(InputError, match=r"y\.zip: there is no such file"):
        Archive(tmp_path / "y.zip")
    with pytest.raises(InputError, match=r"is a folder: name the zip file"):
        Archive(tmp_path)


def entry(name, kind=stat.S_IFREG):
    found = zipfile.ZipInfo(name)
    found.external_attr = kind << 16
    return found


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("a", stat.S_IFLNK)], "'a', which is a link"),
        ([entry("a"), entry("a")], "'a' twice"),
        ([entry("a"), entry("a/b/c")], "'a' as a file and as a folder"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_are_no_files_of_their_own_are_refused(tmp_path, entries, said):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for one in entries:
            archive.writestr(one, "/etc/passwd")
    with pytest.raises(InputError, match=rf"x\.zip: holds {said}.*: not used"):
        Archive(tmp_path / "x.zip")


def test_what_would_fill_the_disk_is_refused_by_its_list(tmp_path, monkeypatch):
    (tmp_path / "x.zip").write_bytes(pack({"a": bytes(2_000_000), "b": b""}))
    monkeypatch.setattr(archive_module, "MOST_BYTES", 1_000_000)
    with pytest.raises(InputError, match=r"holds 2 files of 0\.0 GB, more than"):
        Archive(tmp_path / "x.zip")
    monkeypatch.setattr(archive_module, "MOST_BYTES", 2_000_000)
    monkeypatch.setattr(archive_module, "MOST_ENTRIES", 1)
    with pytest.raises(InputError, match="more than 1 or"):
        Archive(tmp_path / "x.zip")


def test_an_encrypted_archive_is_one_sentence(tmp_path):
    content = bytearray(pack({"a": b"x"}))
    for signature, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + flags] |= 1
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(InputError, match="'a' encrypted; ask for a bundle without a password"):
        Archive(tmp_path / "x.zip")
