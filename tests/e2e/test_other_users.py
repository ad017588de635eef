"""Two users of one machine: one store of their group, and a look into the folder of the other."""

import os
import signal
import subprocess
import time

import pytest
from clone import Workspace, copy_repository, processes, user_environment
from two_users import ALICE, BOB, does, folder_for_all, own_folder, shared_folder

from megaboa.files import read_json, read_jsonl

pytestmark = [
    pytest.mark.slow,
    # The child only becomes another user, and does what a new process would.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class User(Workspace):
    def __init__(self, place, name, number):
        super().__init__(copy_repository(own_folder(place / name, number) / "clone"))
        self.home, self.number = place / name, number
        self.experiment("ours", {"one": "{}"}, steps=60, save_interval=20, more="store: ../../store\n")
        for path in (self.home, *self.home.rglob("*")):
            os.lchown(path, number, number)

    def begin(self, *words, at):
        """Call Snakemake in somebody's clone; as this user."""
        environment = {**user_environment(), "HOME": str(self.home), "USER": str(self.number)}
        said = (self.home / "said").open("w")
        words = self.command("--configfile", "ours.yaml", *words)
        return subprocess.Popen(words, cwd=at.path, env=environment, stdout=said, stderr=subprocess.STDOUT)

    def calls(self, *words, at=None, umask=0o022):
        """What a call prints that ends well."""
        said = does(self.number, lambda: self._ends_well(self.begin(*words, at=at or self)), umask)
        assert said is None, said + (self.home / "said").read_text()
        return (self.home / "said").read_text()

    def _ends_well(self, call):
        assert call.wait() == 0

    def is_killed_at(self, step, umask):
        """A call of which every process is killed at this step."""

        def work():
            call = self.begin(at=self)
            while not any(event.get("step") == step for event in steps(self.home.parent / "store")):
                assert call.poll() is None, (self.home / "said").read_text()
                time.sleep(0.02)
            for pid in {*processes(cwd=self.path)} - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
            call.wait()

        assert does(self.number, work, umask) is None


def steps(store):
    return [event for path in store.glob("runs/ours/one/*/attempts/01/steps.jsonl") for event in read_jsonl(path)]


def test_two_users_of_a_group(monkeypatch):
    with folder_for_all() as place:
        shared_folder(place / "store")
        alice, bob = User(place, "alice", ALICE), User(place, "bob", BOB)
        planned = alice.calls("-n", at=bob)
        assert "\ntrain " in planned and "experiment ours: 1 run on cpu" in planned, "before bob has called"
        bob.is_killed_at(47, umask=0o077)
        assert "lost: the supervisor" in alice.calls(umask=0o077)
        ended = [line for line in read_jsonl(alice.results("ours", "runs", "one", "attempts.jsonl")) if "cause" in line]
        assert [(line["cause"], line["iteration"]) for line in ended] == [("lost", 40), (None, 60)]
        assert read_json(alice.results("ours", "report", "checks.json"))["state"] == "PASS"
        bob.calls()
        subprocess.run(["chmod", "-R", "go+rX", bob.path], check=True)
        assert "Nothing to be done" in alice.calls("-n", at=bob)
        assert "train " in alice.calls("-n", "--config", 'training={"train_iters": 70}', at=bob)
