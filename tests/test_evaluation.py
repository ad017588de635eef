"""A command on an exported model: what is collected, and what is said when it fails."""

import json

import made
import pytest
from pydantic import ValidationError

from megaboa.config.models.outputs import Evaluate
from megaboa.errors import InputError
from megaboa.evaluation import evaluate, files_of
from megaboa.files import file_digest

WRITE = "echo '{document}' > {{out}}"


@pytest.fixture
def call(tmp_path):
    """The evaluation of a run whose export is a folder with a blank in its name."""
    model = tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    export = made.export(run="dp1", path=str(model), iteration=4)
    return lambda command: evaluate(command, export, tmp_path / "store", "tiny")


def kept(tmp_path):
    folder = tmp_path / "store" / "evaluations" / "tiny" / "dp1"
    return [path for path in folder.glob("*") if path.is_dir()] if folder.exists() else []


def test_numbers_are_collected_by_their_keys(call, tmp_path):
    document = {"acc": 0.5, "tasks": {"a": {"acc,none": 1, "alias": "a"}, "ok": True}, "list": [1.5, None, "x"]}
    found = call(WRITE.format(document=json.dumps(document)))
    assert found.values == {"acc": 0.5, "tasks.a.acc,none": 1, "list.0": 1.5}
    assert (found.run, found.iteration, found.export) == ("dp1", 4, "1")
    assert [str(path) for path in kept(tmp_path)] == [found.path]


def test_the_results_of_lm_evaluation_harness(call):
    """It makes a folder of what it is given, and writes a file with its own name below."""
    document = {"results": {"hellaswag": {"acc,none": 0.25, "alias": "h"}}, "config": {"batch_size": 8}}
    found = call(f"mkdir -p {{out}}/my__model && echo '{json.dumps(document)}' > {{out}}/my__model/results_2026.json")
    assert found.values == {"hellaswag.acc,none": 0.25}


def test_the_command_reads_the_model_and_its_words_are_printed(call, capfd):
    found = call("echo hello; ls {model} | wc -l > {out}")
    assert found.values == {"value": 1}
    assert "hello\n" in capfd.readouterr().out


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


def test_a_script_that_changes_during_its_evaluation_is_noted_as_it_was_and_said(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "score.sh"
    script.write_text("echo 1; echo '# edited' >> score.sh")
    before = file_digest(script)
    assert call("sh score.sh {model} > {out}").files == {"score.sh": before}
    assert (
        "warning: score.sh changed during the evaluation: the next call will evaluate again" in capsys.readouterr().out
    )


def test_which_files_of_a_command_are_the_experiments_own(tmp_path, monkeypatch):
    """Those in the working folder, and scripts elsewhere; no program, no hidden file, no log that it writes."""
    folder = tmp_path / "work"
    for name in ("evals/run.py", "tasks", "run.log", "more.log", ".venv/tool", "../outside.py", "../program"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    command = "A=1 .venv/tool && python evals/run.py --tasks='tasks' ../outside.py ../program /bin/ls evals {model}"
    command += f" ~nobody-here/x.py {'x' * 1000} --out={{out}} 2>> run.log | tee -a more.log"
    assert files_of(command) == {name: file_digest(name) for name in ("evals/run.py", "tasks", "../outside.py")}
    assert files_of(None) == files_of("true") == {}


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
        ('echo \'{"a": "b"}\' > {out} # {model}', "has 0 numbers"),
        ("echo '[NaN]' > {out} # {model}", "has 0 numbers"),
    ],
)
def test_a_failure_is_one_sentence_and_keeps_nothing(call, tmp_path, command, message):
    with pytest.raises(InputError, match=message):
        call(command)
    assert [path for path in kept(tmp_path) if not path.name.startswith(".")] == []


def test_a_command_without_its_placeholders_is_refused():
    with pytest.raises(ValidationError, match=r"lacks \{model\} and \{out\}"):
        Evaluate(command="lm_eval")
