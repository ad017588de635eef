"""`megaboa site`: whether locks work where results and checkpoints lie."""

import errno
import os

from megaboa.commands import site


def test_locks_are_tried_for_real_in_the_folders_that_results_lie_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").symlink_to("elsewhere")
    table = site._folders()
    folders, _, locks = ([*column.cells] for column in table.columns)
    assert folders == [str(tmp_path), str(tmp_path / "elsewhere")] and locks == ["they work"] * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], "nothing is left behind"


def test_a_file_system_without_locks_and_a_folder_that_cannot_be_written_say_why(tmp_path, monkeypatch):
    def no_locks(stream, how):  # as Lustre mounted without -o flock
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(site.fcntl, "flock", no_locks)
    assert site._lock_in(tmp_path) == "they don't work: Function not implemented (mount option, or file mode)"
    assert site._lock_in(tmp_path / "missing").startswith("they don't work: No such file or directory")
