"""What says where an experiment ran is taken out, and nothing else."""

import json
import socket
from pathlib import Path

import pytest

from megaboa.bundle.private import Private


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.chdir(tmp_path)
    return Private.here(Path("/home/ada/clone"), Path("/scratch/ada/store"))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/ada/clone/results/x", "./results/x"),
        ("load /home/ada/data.jsonl, please", "load ~/data.jsonl, please"),
        ("/scratch/ada/store/runs/a", "store/runs/a"),
        ("/scratch/ada/other", "/scratch/user/other"),
        ("/home/adam and /home/ada-2", "/home/adam and /home/ada-2"),
        ("ada is a name, /ada-x/ another", "ada is a name, /ada-x/ another"),
        ("/home/ada/clone-2", "~/clone-2"),
        ("It is in /home/ada. And in /home/ada...", "It is in ~. And in ~..."),
        ("gcc -I/home/ada/x -L/home/ada", "gcc -I~/x -L~"),
        (r'{"error": "in\n/home/ada/x"}', r'{"error": "in\n~/x"}'),
        ("/home/ada.old and /home/ada.", "/home/ada.old and ~."),
        ("(/scratch/ada), /scratch/ada.", "(/scratch/user), /scratch/user."),
        ("/ada.json", "/ada.json"),
    ],
)
def test_paths_and_the_user_in_them(machine, text, clean):
    assert machine.text(text) == clean


def test_a_short_path_is_also_the_end_of_others():
    machine = Private.here(Path("/clone"), Path("/data"))
    assert machine.text("results/data/x, ./data and /data/x") == "results/data/x, ./data and store/x"


def test_hosts_in_documents(machine):
    document = {"host": "gpu7", "nodes": 2, "node": ["a1", "a2"], "rank": {"hostname": None}, "x": "gpu7"}
    assert json.loads(machine.json(json.dumps(document))) == {
        "host": "host",
        "nodes": 2,
        "node": ["host", "host"],
        "rank": {"hostname": None},
        "x": "gpu7",
    }
    untouched = '{"b": 1,   "a": 2}'
    assert machine.json(untouched) == untouched


def test_what_is_left_is_found(machine):
    files = {"results/a": b"\0/scratch/ada/store\0", "results/b": b"~/x", "results/c": b"/home/adam"}
    files |= {"results/d": b"-I/home/ada/x", "results/e": b"/home/ada.", "results/f": b"/home/ada.old"}
    assert machine.traces(files) == ["results/a", "results/d", "results/e"]


def test_in_code_only_what_can_be_no_other_word_is_found(monkeypatch, machine):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-17.site.org")
    machine = Private.here(Path("/home/ada/clone"), Path("/data"))
    files = {"a.py": b"ls /home/ada/x", "b.py": b'f"{RESULTS}/data"', "c.sh": b"ssh gpu-17.site", "d": b"ada, /x/ada/"}
    assert machine.traces(files) == ["a.py", "c.sh"]
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    monkeypatch.setenv("HOME", "/root")
    assert Private.here(Path("/clone"), Path("/data")).traces({"a": b"login /root /clone"}) == []


def test_root_is_a_word_and_no_person(monkeypatch):
    monkeypatch.setenv("LOGNAME", "root")
    assert Private.here(Path("/clone"), Path("store")).text("/tree/root/x") == "/tree/root/x"
