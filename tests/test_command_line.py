"""`megaboa COMMAND`: what there is, where it may be called from, and how runs are named."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa import __version__, commands
from megaboa.__main__ import GROUPS, JOBS, NAMES_OF_JOBS, main, usage, usage_of_jobs
from megaboa.commands import hosts
from megaboa.errors import InputError, one_sentence

SCRIPTS = Path(__file__).parents[1] / "workflow" / "scripts"
NAMES = [name for group in GROUPS.values() for name in group]


def call(*words, cwd=None, alone=False):
    """`alone`: with the standard library only."""
    command = [sys.executable, *(["-S"] if alone else []), SCRIPTS / "megaboa", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_help_names_every_command_on_one_screen():
    modules = {path.stem.replace("_", "-") for path in (SCRIPTS / "megaboa" / "commands").glob("[a-z]*.py")}
    assert modules == {*NAMES, *JOBS}
    lines = usage().splitlines()
    assert len(lines) <= 24 and all(len(line) <= 100 for line in lines)
    assert call().stdout == call("--help").stdout == usage() + "\n"


def test_the_version_can_be_asked_for():
    assert call("--version", alone=True).stdout == f"megaboa {__version__}\n"


def test_jobs_have_a_list_of_their_own():
    lines = usage_of_jobs().splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == NAMES_OF_JOBS
    assert all(len(line) <= 100 for line in lines)
    assert call("--help", "jobs", alone=True).stdout == usage_of_jobs() + "\n"


def test_rules_call_commands_that_there_are_and_all_of_jobs():
    rules = "".join(path.read_text() for path in (SCRIPTS.parent / "rules").glob("*.smk"))
    called = set(re.findall(r"\{params\.scripts:q\}/megaboa ([\w-]+)", rules))
    assert called <= {*NAMES, *NAMES_OF_JOBS}
    others = {"check-inside", "report", *JOBS["tables"]}  # by preflight-in-image, report_command, and people
    assert {*NAMES_OF_JOBS} - called == others


@pytest.mark.parametrize("name", [*NAMES, *NAMES_OF_JOBS])
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: megaboa {name} ")


def test_an_unknown_command_names_those_that_there_are():
    done = call("stats")
    assert done.returncode == 2 and "no command 'stats'" in done.stderr and "status" in done.stderr


@pytest.mark.parametrize("name", JOBS["hosts"])
def test_jobs_of_hosts_need_the_standard_library_alone(name):
    assert call(name, "--help", alone=True).stdout.startswith(f"usage: megaboa {name} ")


@pytest.mark.parametrize("name", ["pretrain", "stop"])
def test_commands_of_hosts_need_the_standard_library_alone(name, tmp_path):
    done = call(name, "my/lr0.001", cwd=tmp_path, alone=True)
    assert done.returncode == 2 and "'my/lr0.001'" in done.stderr, done.stderr


def test_what_needs_more_says_what_is_missing():
    done = call("status", alone=True)
    assert done.returncode == 1 and done.stderr.startswith("megaboa status needs rich, which "), done.stderr


def test_a_linked_environment_calls_the_code_of_its_clone(tmp_path):
    environment = Path(sys.executable).parents[1]
    if not (environment / "bin" / "megaboa").exists():
        pytest.skip("this Python's environment was not made by envs/setup.sh")
    shutil.copytree(SCRIPTS / "megaboa", tmp_path / "clone" / "workflow" / "scripts" / "megaboa")
    module = tmp_path / "clone" / "workflow" / "scripts" / "megaboa" / "__main__.py"
    module.write_text(
        module.read_text().replace("def usage() -> str:\n", 'def usage() -> str:\n    return "of the clone"\n')
    )
    (tmp_path / "clone" / ".venv").symlink_to(environment)
    linked, absolute = ".venv/bin/megaboa", environment / "bin" / "megaboa"
    for command, cwd in ((linked, "clone"), (f"clone/{linked}", "."), (absolute, "clone")):
        done = subprocess.run([command], cwd=tmp_path / cwd, capture_output=True, text=True)
        assert done.stdout == "of the clone\n", (command, done.stderr)


def test_a_reader_that_goes_away_is_no_error():
    ended = subprocess.run(["bash", "-c", f"{sys.executable} {SCRIPTS}/megaboa --help | true"], capture_output=True)
    assert ended.stderr == b""


def test_experiments_and_runs_go_by_name_or_by_folder(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "my" / "runs" / "lr0.001"
    folder.mkdir(parents=True)
    (folder / "run.json").touch()
    (tmp_path / "results" / "my" / "plan.tsv").touch()
    (tmp_path / "my").mkdir()  # some other folder of the clone
    monkeypatch.chdir(tmp_path)
    for text in ("my", "results/my", str(folder.parents[1])):
        assert commands.experiment(text).resolve() == folder.parents[1]
    for text in ("my/lr0.001", "results/my/runs/lr0.001", f"{folder}/run.json"):
        assert commands.run(text).resolve() == folder
    for text in ("mine", "results"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"no experiment '{text}' is planned in .*; there are my"):
            commands.experiment(text)
    for text in ("my", "my/", "my/lr0.01", "results/my"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"no run '{text}': say EXPERIMENT/RUN"):
            commands.run(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"there are lr0\.001"):
        commands.run("my/lr0.01")
    asked = {text: commands.asked(text) for text in ("my", "results/my", "my/lr0.001", "results/my/runs/lr0.001")}
    assert [run for _, run in asked.values()] == [None, None, "lr0.001", "lr0.001"]
    assert {results.resolve() for results, _ in asked.values()} == {folder.parents[1]}
    for text in ("mine", "results/mine", "mine/lr0.001", "my/lr0.01"):
        missing = "no run .*; there are lr0" if text == "my/lr0.01" else "no experiment .*; there are my"
        with pytest.raises(argparse.ArgumentTypeError, match=missing):
            commands.asked(text)


def test_bad_input_ends_a_command_with_one_sentence(tmp_path):
    bundle = tmp_path / "broken.zip"
    bundle.write_bytes(b"PK")
    with pytest.raises(SystemExit, match=rf"^error: .*{bundle.name}"):
        main(["reproduce", str(bundle), "--into", str(tmp_path / "into")])


def test_a_capture_that_fails_says_so_as_other_jobs_do(tmp_path, monkeypatch):
    """The doctor finds the reason in the job's log by this."""

    def fail(folder):
        raise InputError("rank 1 was killed")

    monkeypatch.setattr(hosts, "capture_run", fail)
    with pytest.raises(SystemExit, match=r"^error: rank 1 was killed$"):
        main(["capture", str(tmp_path / "run.json"), "--out", str(tmp_path / "profile.json")])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InputError("a.yaml: no"), "error: a.yaml: no"),
        (
            PermissionError(13, "Permission denied", "{0}/there"),
            "error: {0}/there: Permission denied: give this",
        ),
        (PermissionError(13, "Permission denied", "{0}/.new.tmp"), "error: {0}: Permission denied: give this"),
        (PermissionError(1, "Operation not permitted"), "error: [Errno 1] Operation not permitted"),
        (OSError(28, "No space left on device"), "error: the disk is full. Free some space, and call again"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(tmp_path, error, said):
    (tmp_path / "there").touch()
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.format(tmp_path)
    with pytest.raises(SystemExit) as ended, one_sentence():
        raise error
    assert str(ended.value).startswith(said.format(tmp_path))


@pytest.mark.parametrize("name", ["report", "bundle", "compare-tensors", "summarize"])
def test_a_full_disk_ends_a_job_with_one_sentence(monkeypatch, name):
    def full(words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megaboa.__main__.call", full)
    with pytest.raises(SystemExit) as ended:
        main([name, "--out", "results/my/made"])
    assert str(ended.value) == (
        "error: making results/my/made: the disk is full; no partial file was kept. Free some space, and call again"
    )


def test_ctrl_c_ends_a_command_without_a_traceback_and_a_job_says_so_in_its_log(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("megaboa.__main__.call", interrupted)
    assert main(["status"]) == 130 and capsys.readouterr().err == ""
    assert main(["tokenize-shard"]) == 130
    assert capsys.readouterr().err == "interrupted: tokenize-shard; the same call makes it again\n"


def test_names_in_files_of_strangers_control_no_terminal(tmp_path):
    """In what is printed, and in errors."""
    header = json.dumps(
        {"\x1b]0;OWNED\x07a\x9b\u202eb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for words in ((tmp_path,), (tmp_path, "--only", "nothing")):
        done = call("inspect", *words)
        assert "\\x1b]0;OWNED\\x07a\\x9b\\u202eb" in done.stdout + done.stderr
        assert not set(done.stdout + done.stderr) & {"\x1b", "\x07", "\x9b", "\u202e"}
