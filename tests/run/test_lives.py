"""megaboa.run.lives: a real keeper, and what it keeps killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, signal, subprocess, sys, time
from megaboa.run.lives import Signals, kept

def say(*words):
    print(*words, flush=True)

def wait_for(signals, count):
    while len(signals.seen) < count:
        time.sleep(0.01)
"""
HEARS = """
def work(life):
    with Signals() as signals:
        say("ready", os.getpid())
        wait_for(signals, 1)
        time.sleep(0.5)  # for a second one to arrive, if there were any
        say("heard", len(signals.seen), *signals.seen)
        return 130
"""


@pytest.fixture
def keep():
    begun = []

    def start(code):
        script = f"{BEGIN}{code}\nsys.exit(kept(work))\n"
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        more["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
        begun.append(subprocess.Popen([sys.executable, "-c", script], **more))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process):
    said = process.communicate(timeout=60)[0]
    return process.returncode, said


@pytest.mark.parametrize(
    ("code", "returned"),
    [
        ("def work(life): return 0", 0),
        ("def work(life): return 3", 3),
        ("def work(life): raise ValueError('mistake')", 1),
        ("def work(life): sys.exit(4)", 4),
        ("def work(life): os.kill(os.getpid(), signal.SIGABRT)", 128 + signal.SIGABRT),
    ],
)
def test_how_it_ends_is_how_its_keeper_ends(keep, code, returned):
    found, said = ended(keep(code))
    assert found == returned and "was killed" not in said
    assert ("ValueError: mistake" in said) == ("mistake" in code)


def test_who_is_killed_lives_again(keep):
    code = "def work(life):\n    say('life', life)\n    life < 3 and os.kill(os.getpid(), signal.SIGKILL)\n    return 7"
    found, said = ended(keep(code))
    assert found == 7 and [line for line in said.splitlines() if line.startswith("life")] == [
        "life 1",
        "life 2",
        "life 3",
    ]
    assert "the supervisor was killed in life 1 of 5" in said


def test_but_not_for_ever(keep):
    found, said = ended(keep("def work(life):\n    say('life', life)\n    os.kill(os.getpid(), signal.SIGKILL)"))
    assert found == 128 + signal.SIGKILL and said.count("was killed in life") == 5


def test_what_it_leaves_behind_is_gone_before_its_next_life(keep):
    code = """
def work(life):
    if life == 1:
        orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
        say("orphan", orphan.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    return 0
"""
    found, said = ended(keep(code))
    orphan = next(int(line.split()[1]) for line in said.splitlines() if line.startswith("orphan"))
    assert found == 0 and not Path(f"/proc/{orphan}").exists()


@pytest.mark.parametrize("to", ["keeper", "group", "supervisor"])
def test_a_signal_is_heard_once_whoever_gets_it(keep, to):
    process = keep(HEARS)
    pid = int(process.stdout.readline().split()[1])
    if to == "group":  # Ctrl-C in a terminal; SLURM signals all processes of a step
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid if to == "keeper" else pid, signal.SIGINT)
    found, said = ended(process)
    assert found == 130 and said.startswith("heard 1 ")
    assert ("SIGINT" in said or "a signal that its keeper got" in said) and "was killed" not in said


def test_a_second_one_is_heard_too(keep):
    process = keep(HEARS.replace("wait_for(signals, 1)", "wait_for(signals, 1); say('one'); wait_for(signals, 2)"))
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "one\n"
    os.killpg(process.pid, signal.SIGTERM)
    found, said = ended(process)
    assert found == 130 and said.startswith("heard 2 ")


def test_who_was_asked_to_end_gets_no_other_life(keep):
    process = keep(
        "def work(life):\n    with Signals() as signals:\n        say(life, os.getpid())\n        time.sleep(600)"
    )
    pid = int(process.stdout.readline().split()[1])
    os.kill(process.pid, signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)
    found, said = ended(process)
    assert found == 128 + signal.SIGKILL and not said


def test_a_signal_before_anybody_listens_ends_it_as_ever(keep):
    # Python's handler runs between two instructions: a signal just before one long sleep would wait for its end
    process = keep("def work(life):\n    say('ready')\n    while True:\n        time.sleep(0.01)")
    process.stdout.readline()
    os.kill(process.pid, signal.SIGTERM)
    found, said = ended(process)
    assert found == 1 and "KeyboardInterrupt" in said
