import os

from megaboa.files import read_jsonl
from megaboa.run import ledger


def test_attempts_are_numbered_and_a_killed_one_counts(tmp_path):
    path = tmp_path / "attempts.jsonl"
    assert ledger.next_attempt(path) == 1
    ledger.record_start(path, 1, resumed_from=0, world_size=2)
    assert ledger.next_attempt(path) == 2  # whether or not it has ended
    ledger.record_end(path, 1, "failed", iteration=10, detail="rank 1 was killed by SIGKILL")
    ledger.record_start(path, 2, resumed_from=10, world_size=2)
    start, end, again = read_jsonl(path)
    assert start["event"] == "start" and start["pid"] == os.getpid() and start["world_size"] == 2
    assert end["outcome"] == "failed" and end["iteration"] == 10 and end["detail"].startswith("rank 1")
    assert again["resumed_from"] == 10 and again["time"] >= start["time"]
