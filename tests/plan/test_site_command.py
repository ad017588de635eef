"""`megaboa site`: whether locks work where results and checkpoints lie."""

import errno
import os
from pathlib import Path

import pytest

from megaboa.commands import site

REPOSITORY = Path(__file__).parents[2]


def test_locks_are_tried_for_real_in_the_folders_that_results_lie_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").symlink_to("elsewhere")
    table = site._folders(Path("store"))
    folders, _, locks = ([*column.cells] for column in table.columns)
    assert folders == [str(tmp_path), str(tmp_path / "elsewhere")] and locks == ["they work"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], "nothing is left behind"


def test_the_store_is_the_experiments_and_that_of_the_default_one_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert site._store([]) == Path("store")
    (tmp_path / "config").mkdir()
    text = (REPOSITORY / "config" / "config.yaml").read_text()
    (tmp_path / "config" / "config.yaml").write_text(f"store: {tmp_path}/scratch/mine\n{text}")
    assert site._store([]) == tmp_path / "scratch" / "mine"
    (tmp_path / "my.yaml").write_text(f"store: ~/mine\n{text}")
    assert site._store(["my.yaml"]) == Path.home() / "mine"
    (tmp_path / "scratch").mkdir()
    assert [*site._folders(site._store([])).columns[0].cells] == [str(tmp_path), str(tmp_path / "scratch")], "above it"
    (tmp_path / "config" / "config.yaml").write_text("samples: of a workflow around this one\n")
    assert site._store([]) == Path("store")
    with pytest.raises(SystemExit, match=r"missing\.yaml: can't be read"):
        site._store(["missing.yaml"])


def test_a_file_system_without_locks_and_a_folder_that_cannot_be_written_say_why(tmp_path, monkeypatch):
    def no_locks(stream, how):  # as Lustre mounted without -o flock
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(site.fcntl, "flock", no_locks)
    assert site._lock_in(tmp_path) == "they don't work: Function not implemented (mount option, or file mode)"
    assert site._lock_in(tmp_path / "missing").startswith("they don't work: No such file or directory")
