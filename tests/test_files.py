"""megaboa.files: small files written whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaboa import files


def test_canonical_is_the_same_text_for_the_same_value():
    assert files.canonical({"b": 1, "a": [1.0, "ü"]}) == files.canonical({"a": [1.0, "ü"], "b": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})


def test_write_text_replaces_in_one_step_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "deep" / "file.json"
    files.write_json(path, {"a": 1})
    files.write_json(path, {"a": 2})
    assert files.read_json(path) == {"a": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_write_if_changed_leaves_the_time_stamp_of_the_same_text(tmp_path):
    path = tmp_path / "file"
    assert files.write_if_changed(path, "text")
    os.utime(path, (1, 1))
    assert not files.write_if_changed(path, "text") and path.stat().st_mtime == 1
    assert files.write_if_changed(path, "other") and path.read_text() == "other"


def test_a_file_that_is_replaced_keeps_its_mode_and_group(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o664)
    group = 65003 if os.geteuid() == 0 else os.getegid()
    os.chown(path, -1, group)
    before = os.umask(0o077)
    try:
        files.write_text(path, "new")
        files.write_text(tmp_path / "another", "new")
    finally:
        os.umask(before)
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o664 and path.stat().st_gid == group
    assert (tmp_path / "another").stat().st_mode & 0o777 == 0o600


def test_read_jsonl_leaves_out_a_torn_last_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a":')
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    assert files.read_jsonl(tmp_path / "missing") == []


def test_a_torn_line_in_the_middle_spoils_no_other(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a":')
    files.append_line(path, '{"a": 3}')
    files.append_line(path, '{"a": 4}')
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 3}, {"a": 4}]


def test_a_line_that_the_disk_has_no_room_for_is_an_error_and_is_there_when_it_is_written_again(tmp_path):
    """The limit on a file's size stops a write in its middle, as a full disk does at the end of a page."""
    path = tmp_path / "lines.jsonl"
    writer = (
        "import json, resource, signal, sys; sys.path.insert(0, 'workflow/scripts')\n"
        "from megaboa import files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        f"path, text = {str(path)!r}, json.dumps('x' * 60)\n"
        "files.append_line(path, text)\n"
        "try:\n"
        "    files.append_line(path, text)\n"
        "except OSError:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    files.append_line(path, text)\n"
    )
    subprocess.run([sys.executable, "-c", writer], check=True)
    assert len(path.read_text().splitlines()) == 3, "the second was torn"
    assert files.read_jsonl(path) == ["x" * 60] * 2


def test_link_replaces_an_older_link(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        files.link(tmp_path / name, tmp_path / "links" / "current")
    current = tmp_path / "links" / "current"
    assert current.read_text() == "two"
    before = current.lstat()
    files.link(tmp_path / "two", current)
    assert current.lstat() == before, "what reads through it would be made again"


def test_a_writer_killed_at_any_moment_never_leaves_half_a_file(tmp_path):
    path = tmp_path / "file.json"
    writer = (
        "import sys; sys.path.insert(0, 'workflow/scripts')\n"
        "from megaboa import files\n"
        f"while True: files.write_json({str(path)!r}, list(range(20000)))"
    )
    for delay in (0.3, 0.37, 0.41):
        process = subprocess.Popen([sys.executable, "-c", writer])
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if path.exists():
            assert files.read_json(path) == list(range(20000))


def test_a_link_below_a_folder_that_is_a_link_leads_where_it_should(tmp_path):
    """`results` on another disk: what is relative to its name in the clone isn't so to where it is."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "large" / "disk" / "results").mkdir(parents=True)
    (tmp_path / "clone" / "results").symlink_to("../large/disk/results")
    ledger = tmp_path / "clone" / "store" / "attempts.jsonl"
    ledger.parent.mkdir()
    ledger.write_text("here")
    link = tmp_path / "clone" / "results" / "mine" / "attempts.jsonl"
    files.link(ledger, link)
    assert link.read_text() == "here" and not link.readlink().is_absolute()
    (tmp_path / "clone" / "elsewhere").symlink_to("../large")
    files.link(tmp_path / "clone" / "elsewhere" / "disk", link)
    assert (link / "results").is_dir()


def test_a_relative_target_is_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    files.link("store", "results/mine/store")
    assert (tmp_path / "results" / "mine" / "store").readlink() == Path("../../store")


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"a": ')
    with pytest.raises(files.DamagedError, match=r"run\.json is not valid JSON \(Expecting value.*call again"):
        files.read_json(tmp_path / "run.json")
