"""A command on an exported model: what is collected, and what is said when it fails."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import made
import pytest
from pydantic import ValidationError

from megaboa.config.models.outputs import Evaluate
from megaboa.errors import InputError
from megaboa.evaluation import evaluate, files_of, place, script_of
from megaboa.files import file_digest, write_text
from megaboa.records import EvaluateSpec, Evaluation, read, write

WRITE = "echo '{document}' > {{out}}"


@pytest.fixture
def call(tmp_path):
    """The evaluation of a run whose export is a folder with a blank in its name."""
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    export = made.export(run="dp1", path=str(model), iteration=4)

    def called(command, files=None):
        spec = EvaluateSpec(command=command, files=files or {})
        return evaluate(spec, export, tmp_path / "store", tmp_path / "results" / "tiny")

    return called


def kept(tmp_path):
    folder = tmp_path / "store" / "evaluations" / "tiny" / "dp1"
    return [path for path in folder.glob("*") if path.is_dir()] if folder.exists() else []


def test_the_command_knows_what_it_evaluates(call):
    found = call("echo '{\"step\": '$MEGABOA_STEP', \"letters\": '${#MEGABOA_RUN}'}' > {out} # {model}")
    assert found.values == {"step": 4, "letters": len("dp1")}


def test_numbers_are_collected_by_their_keys(call, tmp_path):
    document = {"acc": 0.5, "tasks": {"a": {"acc,none": 1, "alias": "a"}, "ok": True}, "list": [1.5, None, "x"]}
    found = call(WRITE.format(document=json.dumps(document)))
    assert found.values == {"acc": 0.5, "tasks.a.acc,none": 1, "list.0": 1.5}
    assert (found.run, found.iteration, found.export) == ("dp1", 4, "1")
    assert [str(path) for path in kept(tmp_path)] == [found.path]


def test_what_is_no_number_is_named_in_the_log(call, capsys):
    document = {"acc": 0.5, "lost": None, "list": [1.5, "x" * 99], "ok": True, "empty": {}}
    for _ in range(2):  # a stored evaluation says it, too
        assert call(WRITE.format(document=json.dumps(document)) + " # {model}").values == {"acc": 0.5, "list.0": 1.5}
        [said] = [line for line in capsys.readouterr().out.splitlines() if "no numbers" in line]
        start = "dp1: left out, as they are no numbers: lost (null), list.1 ('xxx"
        assert said.startswith(start) and said.endswith("xxx'), ok (true)")


def test_numbers_whose_keys_join_to_one_name_are_all_kept(call, capsys):
    document = '{"a": {"b": 1}, "a.b": 2, "": 3, "value": 4, "c": 5, "c": 6}'
    found = call(f"echo '{document}' > {{out}} # {{model}}").values
    assert found == {"a.b": 1, "a.b (2)": 2, "value": 3, "value (2)": 4, "c": 5, "c (2)": 6}
    said = "dp1: numbers of one name are kept apart: a.b is a.b (2), value is value (2)\n"
    assert capsys.readouterr().out.endswith(said)


def test_numbers_that_are_not_finite_stay_on_record(call, tmp_path):
    found = call('echo \'{"acc": 0.5, "loss": NaN, "ppl": [Infinity, -1' + "0" * 400 + "]}' > {out} # {model}")
    assert found.values == {"acc": 0.5}
    assert found.not_finite == {"loss": "nan", "ppl.0": "inf", "ppl.1": "-inf"}
    write(tmp_path / "evaluation.json", found)
    assert read(Evaluation, tmp_path / "evaluation.json") == found and math.isnan(found.numbers["loss"])
    assert call("echo '[NaN]' > {out} # {model}").not_finite == {"0": "nan"}


def test_the_results_of_lm_evaluation_harness(call):
    """It makes a folder of what it is given, and writes a file with its own name below."""
    document = {"results": {"hellaswag": {"acc,none": 0.25, "alias": "h"}}, "config": {"batch_size": 8}}
    found = call(f"mkdir -p {{out}}/my__model && echo '{json.dumps(document)}' > {{out}}/my__model/results_2026.json")
    assert found.values == {"hellaswag.acc,none": 0.25}


def test_the_command_reads_the_model_and_its_words_are_printed(call, capfd):
    found = call("echo hello; ls {model} | wc -l > {out}")
    assert found.values == {"value": 1}
    assert "hello\n" in capfd.readouterr().out


def test_its_words_come_before_what_is_said_of_its_failure(tmp_path):
    """In a log, which is a pipe: the last line says what failed."""
    code = (
        "import made; from megaboa.evaluation import _call; from pathlib import Path\n"
        "_call('echo hello; false # {model} {out}', made.export(), Path('o'))"
    )
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=found
    )
    assert done.returncode and done.stdout.index("hello\n") < done.stdout.index("Traceback")


def test_what_was_evaluated_already_is_not_called_again(call, tmp_path):
    command = f"echo x >> {tmp_path}/calls; cat {{model}}/config.json; echo 3 > {{out}}"
    assert call(command).values == call(command).values == {"value": 3}
    assert (tmp_path / "calls").read_text() == "x\n"
    call(command + " ")
    assert (tmp_path / "calls").read_text() == "x\nx\n"


def test_an_edited_script_is_called_again_and_noted(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "score.sh"
    command = "sh score.sh {model} > {out}"
    script.write_text("echo 1")
    first = call(command)
    assert (first.values, first.files) == ({"value": 1}, {"score.sh": file_digest(script)})
    script.write_text("echo 2")
    second = call(command)
    assert (second.values, second.files) == ({"value": 2}, {"score.sh": file_digest(script)})
    script.write_text("echo 1")
    assert call(command) == first and len(kept(tmp_path)) == 2


def test_of_a_script_that_changes_during_its_evaluation_nothing_is_kept(call, tmp_path, monkeypatch):
    """Its values would be found by the digest of a version that may not have made them."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "score.sh"
    script.write_text("echo 1; echo '# edited' >> score.sh")
    with pytest.raises(InputError, match=r"command: score\.sh changed during the evaluation, .* Nothing of it"):
        call("sh score.sh {model} > {out}")
    assert kept(tmp_path) == []
    script.write_text("echo 2")
    assert call("sh score.sh {model} > {out}").values == {"value": 2}


def test_a_script_that_is_edited_while_another_job_evaluates_is_seen(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "score.sh"
    script.write_text("echo 1")

    @contextlib.contextmanager
    def building(final):
        script.write_text("echo 2")
        yield tmp_path / "never made"

    monkeypatch.setattr("megaboa.evaluation.store.building", building)
    with pytest.raises(InputError, match=r"score\.sh changed during the evaluation"):
        call("sh score.sh {model} > {out}")


@pytest.mark.parametrize("first", [None, "of a trial by hand"])
def test_files_that_the_command_itself_writes_are_noted_as_such(call, tmp_path, monkeypatch, capsys, first):
    """They are in no digest: after the next call they would be others, for ever."""
    monkeypatch.chdir(tmp_path)
    write_text("score.sh", 'date +%N >> "$2"; echo x >> calls; echo 1')
    if first:
        write_text("my eval.log", first)
    command = "sh score.sh --log 'my eval.log' {model} > {out}"
    script = {"score.sh": file_digest("score.sh")}
    planned = files_of(command, Path("results"))
    assert planned.keys() == ({*script, "my eval.log"} if first else {*script})
    made = call(command, planned)
    assert (made.files, made.written) == (script, ("my eval.log",))
    said = "warning: evaluate.command: my eval.log changed during the evaluation, so the command writes there"
    assert (said in capsys.readouterr().err) == bool(first)
    assert call(command, script) == made, "the plan leaves it out"
    assert Path("calls").read_text() == "x\n" and [str(path) for path in kept(tmp_path)] == [made.path]


def test_which_files_of_a_command_are_the_experiments_own(tmp_path, monkeypatch):
    """Those in the working folder, and scripts elsewhere; no program, no hidden file, no log that it writes."""
    folder = tmp_path / "work"
    for name in ("evals/run.py", "tasks", "run.log", "more.log", ".venv/tool", "../outside.py", "../program"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    command = "A=1 .venv/tool && python evals/run.py --tasks='tasks' ../outside.py ../program /bin/ls evals {model}"
    command += f" ~nobody-here/x.py {'x' * 1000} --out={{out}} 2>> run.log | tee -a more.log"
    results = Path("results")
    wanted = {name: file_digest(name) for name in ("evals/run.py", "tasks", "../outside.py")}
    assert files_of(command, results) == wanted
    assert files_of(None, results) == files_of("true", results) == {}


def test_quoted_paths_and_variables_are_seen(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    for name in ("my eval.py", "a.py", "b.yaml", "c.py", "d e.json", "f.py", "my run.log"):
        write_text(folder / name, name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", "/elsewhere")
    monkeypatch.setenv("HERE", str(folder))
    command = "python \"my eval.py\" $PWD/a.py ${HERE}/b.yaml --tasks='d e.json' {model} > 'my run.log'"
    command += " && bash -c 'python c.py; python ./f.py {out}'"
    wanted = ["my eval.py", "$PWD/a.py", "${HERE}/b.yaml", "d e.json", "c.py", "./f.py"]
    assert list(files_of(command, Path("results"))) == wanted
    assert [place(name) for name in wanted[1:3]] == [f"{folder}/a.py", f"{folder}/b.yaml"]
    assert list(files_of("cat <<< it's; python a.py {model} {out}", Path("results"))) == ["a.py"]


def test_what_is_below_the_results_is_made_by_other_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text("results/tiny/report/data/a.tsv", "1")
    assert files_of("cat results/tiny/report/data/a.tsv {model} {out}", Path("results")) == {}


def test_a_file_that_cant_be_read_is_said_and_not_tracked(tmp_path, monkeypatch, capsys):
    """One file of another user's ended every call, also `snakemake -n`."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "locked.py"):
        write_text(name, name)

    def digest(path):
        if Path(path).name == "locked.py":
            raise PermissionError(13, "Permission denied")
        return "1"

    monkeypatch.setattr("megaboa.evaluation.file_digest", digest)
    for _ in range(2):
        assert files_of("python a.py locked.py {model} {out}", Path("results")) == {"a.py": "1"}
    said = "warning: evaluate.command: locked.py can't be read (Permission denied): its edits will evaluate nothing\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo 1 > {out}; echo why >&2; exit 3 # {model}", r"run dp1: ended with 3: why\. Nothing of it was kept"),
        ("kill -9 $$ # {model} {out}", "ended with -9"),
        ("true {model} {out}", "must write one JSON file to {out}, or below it; it wrote none"),
        (
            "mkdir {out}; echo 1 > {out}/a.json; echo 2 > {out}/b.json # {model}",
            "it wrote out.json/a.json, out.json/b.json",
        ),
        ("echo [ > {out} # {model}", "out.json: isn't JSON"),
        ('echo \'{"a": "b"}\' > {out} # {model}', r"has 0 numbers, .* \(left out, as they are no numbers: a \('b'\)\)"),
        ("echo '[null]' > {out} # {model}", "has 0 numbers"),
    ],
)
def test_a_failure_is_one_sentence_and_keeps_nothing(call, tmp_path, command, message):
    with pytest.raises(InputError, match=message):
        call(command)
    assert [path for path in kept(tmp_path) if not path.name.startswith(".")] == []


def test_a_command_without_its_placeholders_is_refused():
    with pytest.raises(ValidationError, match=r"lacks \{model\} and \{out\}"):
        Evaluate(command="lm_eval")


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python my_eval.py {model} {out}", "my_eval.py"),
        ("/usr/bin/python3.12 -u tools/my_eval.py {model} {out}", "tools/my_eval.py"),
        ("./my_eval.sh {model} {out}", "./my_eval.sh"),
        *((command, None) for command in ("", "python 'my_eval.py {model}", "cd x && python y.py", "lm_eval z.py")),
        *(
            (command, None)
            for command in ("python -m my_eval x.py", "bash -c 'x.sh {model}.py'", "python {model}/a.py")
        ),
        *((command, None) for command in ("python /opt/a.py", "python ~/a.py", "python $HOME/a.py", "python -")),
    ],
)
def test_the_script_that_a_command_starts(command, script):
    assert script_of(command) == script
