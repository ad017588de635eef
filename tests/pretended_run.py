"""A run of a real supervisor and ranks that only pretend to train."""

import os

from megaboa import files
from megaboa.config.models.resources import Launch, Recovery
from megaboa.paths import RunFolder
from megaboa.records import line, read_ledger
from megaboa.run import command, identity, ledger, supervisor, watch
from megaboa.store_paths import RunStore

LAST, INTERVAL = 6, 2

# It writes what a rank writes. What goes wrong is `@misfortune`, which may look at `attempt`, `begin`, `step`.
RANK = """
import argparse, json, os, shutil, signal, sys, time
from pathlib import Path
from megaboa import files
from megaboa.run import checkpoints

parser = argparse.ArgumentParser()
for name in ("run", "store", "attempt", "claim", "asked"):
    parser.add_argument(f"--{name}")
parser.add_argument("--resume-from", type=int)
given = parser.parse_args()
root, folder, begin = Path(given.store) / "checkpoints", Path(given.attempt), given.resume_from
attempt, step = int(folder.name), None

def misfortune():
    @misfortune

def event(event, **fields):
    with (folder / "steps.jsonl").open("a") as stream:
        files.share(stream.name)
        stream.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\\n")

event("phase", phase="configured")
misfortune()
event("phase", phase="built")
for step in range(begin + 1, @last + 1):
    event("step", step=step, loss=1.0)
    if step % @interval == 0:
        saved = checkpoints.folder(root, step)
        saved.mkdir(parents=True)
        (saved / "__0_0.distcp").write_text(f"{step} " * 100)
        shutil.copy(saved / "__0_0.distcp", root / "latest_train_state.pt")  # as Bridge does
        (saved / checkpoints.LAST_WRITTEN).write_text("all: right")
        checkpoints.mark_complete(root)
    misfortune()
"""

_asked, _known = command._environment, {}


def _environment(folder):
    """What the ranks' Python has answered; asked once for each: a start of Python for every attempt."""
    python = folder.launch.start.python, os.environ.get("PYTHONPATH")
    if folder.image or python not in _known:
        _known[python] = _asked(folder)
    return _known[python]


class Run:
    """One run in a folder of its own."""

    starter = "local"

    def __init__(self, path, monkeypatch):
        self.folder = RunFolder(path / "results" / "new" / "runs" / "child")
        self.rank, self._patch = path / "rank.py", monkeypatch
        asked = {"device": "cpu", "world_size": 1, "model": {"recipe": "none", "tokenizer": None, "init": "scratch"}}
        asked |= {"data": {}, "training": {"train_iters": LAST}}
        files.write_json(self.folder.path / "run.json", asked)
        files.write_json(self.folder.path / "profile.json", {})
        self.launch()
        self.misfortune("pass")
        monkeypatch.setattr(command, "RANK_SCRIPT", self.rank)
        monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(command, "_environment", _environment)

    def launch(self, **recovery):
        launch = {"store": str(self.rank.parent / "store"), "nodes": 1, "gpus_per_node": 1, "cpus_per_rank": 1}
        launch |= {
            "start": Launch(starter=self.starter).model_dump(mode="json"),
            "checkpoint": {"save_interval": INTERVAL},
        }
        launch["recovery"] = Recovery(**{"backoff_seconds": 0.0, **recovery}).model_dump(mode="json")
        files.write_json(self.folder.path / "launch.json", launch)

    def misfortune(self, code):
        text = RANK.replace("@misfortune", code).replace("@last", str(LAST)).replace("@interval", str(INTERVAL))
        self.rank.write_text(text)

    @property
    def store(self) -> RunStore:
        return identity.store_of(self.folder, identity.identity_of(self.folder))

    @property
    def entries(self):
        return read_ledger(self.store.ledger)

    @property
    def attempts(self):
        """Of every attempt where it began, how it ended and why."""
        begun = {start.attempt: start.resumed_from for start in ledger.starts(self.entries)}
        return [(begun[end.attempt], end.outcome, end.cause) for end in ledger.ends(self.entries)]

    def train(self):
        return supervisor.train(RunFolder(self.folder.path))

    def rewrite(self, *entries):
        self.store.ledger.write_text("".join(line(entry) + "\n" for entry in entries))

    def forget_last_lines(self, count):
        lines = self.store.ledger.read_text().splitlines(keepends=True)
        self.store.ledger.write_text("".join(lines[:-count]))
