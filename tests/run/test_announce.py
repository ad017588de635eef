"""megaboa.run.announce: lines that nothing relies on, and a command of the user's."""

import io
import os
import sys
import time

import pytest

from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.run import announce
from megaboa.run.announce import notify
from megaboa.store_paths import RunStore


def test_lines_for_people_wait_for_no_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("waited for the disk"))
    folder = RunFolder(tmp_path / "results" / "new" / "runs" / "child")
    announce.announcer(folder)("12/60")
    assert (
        folder.progress_log.read_text() == capsys.readouterr().err
        and "child            12/60" in folder.progress_log.read_text()
    )


def test_a_line_is_one_write_so_that_no_other_runs_line_comes_in_between(tmp_path, monkeypatch):
    class Terminal(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            written.append(bytes(data))
            return len(data)

    written = []
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Terminal(), write_through=True))  # as with PYTHONUNBUFFERED
    announce.announcer(RunFolder(tmp_path / "results" / "new" / "runs" / "child"))("ETA 0:02")
    assert len(written) == 1 and written[0].endswith(b"ETA 0:02\n")


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "results").write_text("no folder")
    announce.announcer(RunFolder(tmp_path / "results" / "new" / "runs" / "child"))("12/60")
    assert "12/60" in capsys.readouterr().err


@pytest.mark.parametrize(("in_job", "lines"), [(False, 31), (True, 2)])
def test_in_a_job_progress_is_told_less_often(tmp_path, monkeypatch, in_job, lines):
    store, said, clock = RunStore(tmp_path), [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    write_json(store.identity, {"run": {"training": {"train_iters": 1000}}})
    store.ledger.write_text('{"event": "start", "attempt": 1, "time": 1, "host": "n1", "pid": 1}\n')
    store.attempt(1).path.mkdir(parents=True)
    report = announce.progress_reporter(store, said.append, in_job)
    for second in range(63):
        with store.attempt(1).steps.open("a") as steps:
            steps.write(f'{{"event": "step", "step": {second + 1}, "time": {second}, "loss": 1.0}}\n')
        clock[0] = float(second)
        report()
    assert len(said) == lines


def test_nobody_is_told_where_nobody_asked():
    assert notify(None, run="dp2") is None
    assert notify("", run="dp2") is None


def test_the_command_knows_what_happened(tmp_path):
    command = f'echo "$MEGABOA_RUN|$MEGABOA_STATE|$MEGABOA_DETAIL|$HOME" >{tmp_path}/told'
    assert notify(command, run="dp2", state="failed", detail='nan: it\'s "bad"; rm -rf $HOME') is None
    run, state, detail, home = (tmp_path / "told").read_text().strip().split("|")
    assert (run, state, detail) == ("dp2", "failed", 'nan: it\'s "bad"; rm -rf $HOME')
    assert home.startswith("/")


def test_what_went_wrong_is_said_and_does_no_harm():
    assert notify("echo no such user >&2; exit 3", run="dp2") == (
        "the notification failed with exit status 3: no such user"
    )
    assert notify("exit 22") == "the notification failed with exit status 22: it wrote no message"
    assert "the notification failed" in notify("/no/such/program")


def test_a_failure_names_neither_the_command_nor_addresses():
    said = notify("echo 'wget: https://hooks.example.com/s3cr3t: 404' >&2; exit 8")
    assert said == "the notification failed with exit status 8: wget: (address) 404"


def test_a_command_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(announce, "NOTIFY_SECONDS", 0.2)
    assert notify("exec sleep 30") == "the notification took more than 0.2 s and was ended"
