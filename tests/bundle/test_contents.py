"""What goes into a bundle, and what keeps it from being made."""

import hashlib
import json
import subprocess
from pathlib import Path

import made
import pytest

from megaboa.bundle import contents
from megaboa.bundle.contents import LARGEST, Asked, collect
from megaboa.bundle.private import Private
from megaboa.errors import InputError
from megaboa.evaluation import files_of
from megaboa.files import write_json, write_text
from megaboa.records import EvaluateSpec, FrozenTokenizer, ImageAsked, ReportSpec, SourceFile, Sources, write

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt_tiny.py"


CODE = {"commit": None, "changed": None, "digest": "1"}
TRAIN = {"run": "a", "identity": "x", "iteration": 1, "train_iters": 1, "world_size": 1}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Results of a run of a recipe, in a folder that is not the clone."""
    monkeypatch.chdir(tmp_path)
    results = tmp_path / "results" / "tiny"
    write_json(results / "specs" / "runs.json", {"runs": ["a"]})
    write_json(results / "specs" / "image.json", {"runtime": "none"})
    write_json(results / "runs" / "a" / "run.json", {"device": "cpu", "model": {"name": "tiny", "recipe": str(RECIPE)}})
    write_json(results / "runs" / "gone" / "run.json", {"device": "cuda"})
    write_json(results / "runs" / "a" / "train.json", {**TRAIN, "store": str(tmp_path / "store"), "host": "n1"})
    (tmp_path / "tiny.yaml").write_text(f"store: {tmp_path}/store\n")
    return Asked(results, [Path("tiny.yaml")], {"training": {"seed": 1}})


def bundled(asked, **environment):
    return collect(asked, Private.here(Path(), Path("store")), environment)


@pytest.mark.parametrize(("runtime", "there"), [("none", False), ("apptainer", True)])
def test_what_an_image_said_goes_with_it_alone(asked, runtime, there):
    container = made.image_spec(runtime=runtime) if there else None
    write(asked.results / "specs" / "image.json", ImageAsked(container=container))
    write_json(asked.results / "preflight-in-image.json", {})
    assert ("results/tiny/preflight-in-image.json" in bundled(asked)) == there


def test_chat_templates_go_with_it_wherever_they_are_named(asked, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jinja").write_text(name)
    Path("tiny.yaml").write_text("tuning: {template: a.jinja}\nsweep: {grid: {tuning.template: [b.jinja, none]}}\n")
    files = bundled(asked)
    assert (files["a.jinja"], files["b.jinja"]) == (b"a", b"b") and "none" not in files


def test_the_runs_of_the_plan_with_code_and_configuration(asked):
    files = bundled(asked)
    assert {"Snakefile", "recipes/gpt_tiny.py", "workflow/scripts/train_rank.py", "envs/pipeline.txt"} <= set(files)
    assert not [name for name in files if "gone" in name or "__pycache__" in name or name.startswith("profiles/slurm")]
    assert files["config/command-line.yaml"] == b"training:\n  seed: 1\n"
    train = json.loads(files["results/tiny/runs/a/train.json"])
    assert (train["store"], train["host"]) == ("store", "host")
    manifest = json.loads(files["bundle.json"])
    assert manifest["device"] == ["cpu"] and manifest["identities"] == {"a": "x"}
    [config] = [content for name, content in files.items() if name.endswith("tiny.yaml")]
    assert config == b"store: store\n"


def test_a_secret_names_its_file_and_variable_and_not_itself(asked, tmp_path):
    (tmp_path / "tiny.yaml").write_text("# hf_abcdefgh\n")
    with pytest.raises(InputError, match=r"tiny\.yaml: holds the value of HF_TOKEN") as error:
        bundled(asked, HF_TOKEN="hf_abcdefgh", PATH="/usr/bin")
    assert "hf_abcdefgh" not in str(error.value)


def test_a_webhook_in_the_page_of_an_earlier_version_is_refused(asked, tmp_path):
    Path("tiny.yaml").write_text("recovery: {notify: 'curl https://hooks/s3cr3t -d \"$MEGABOA_RUN\"'}\n")
    assert b"s3cr3t" not in b"".join(bundled(asked).values())
    page = asked.results / "report" / "index.html"
    write_text(page, "<pre>notify: &#39;curl https://hooks/s3cr3t -d &#34;$MEGABOA_RUN&#34;&#39;</pre>")
    with pytest.raises(InputError, match=r"index\.html: holds the address in recovery\.notify") as error:
        bundled(asked)
    assert "s3cr3t" not in str(error.value) and "--forcerun report" in str(error.value)


def test_what_could_not_be_made_again_is_refused(asked, tmp_path):
    elsewhere = tmp_path / "mine.py"
    elsewhere.write_text("")
    write_json(
        asked.results / "runs" / "a" / "run.json", {"device": "cpu", "model": {"name": "own", "recipe": str(elsewhere)}}
    )
    with pytest.raises(InputError, match=r"models\.own\.recipe: .*mine\.py lies outside .*: copy it into recipes/"):
        bundled(asked)


def test_two_configurations_of_one_name_are_refused(asked, tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.yaml").write_text("")
    monkeypatch.chdir(tmp_path / "one")
    files = [tmp_path / "two" / "x.yaml", tmp_path / "two" / ".." / "two" / "x.yaml"]
    with pytest.raises(InputError, match=r"two configuration files would be config/x\.yaml"):
        collect(Asked(asked.results, files, {}), Private.here(Path(), Path("store")), {})


def test_the_state_of_the_code_is_a_digest():
    assert contents.code_state() == contents.code_state() and len(contents.code_state()) == 64


def test_code_is_bundled_byte_for_byte(asked, monkeypatch):
    """Also where the store is `/data`, and the user is called as a folder of the code is."""
    monkeypatch.setenv("LOGNAME", "local")
    machine = Private.here(Path(), Path("/data"))
    files = collect(asked, machine, {})
    made = ("README.md", "results/")
    code = [name for name in files if (contents.ROOT / name).is_file() and not name.startswith(made)]
    assert {"Makefile", "workflow/rules/common.smk", "profiles/local/config.yaml"} <= set(code)
    assert [name for name in code if files[name] != (contents.ROOT / name).read_bytes()] == []
    assert machine.traces(files) == []


def test_a_clone_that_git_refuses_is_no_folder_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert contents._git("rev-parse", "HEAD") == ""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to have another user's
    with pytest.raises(InputError, match=r"git does not read this clone, .*dubious ownership.*safe\.directory"):
        contents._git("rev-parse", "HEAD")


def test_what_was_made_along_a_training_and_what_a_run_was_are_in_it(asked):
    run = asked.results / "runs" / "a"
    for name in ("along/40/proof.json", "earlier/0123456789ab/train.json"):
        write_json(run / name, {})
    assert {
        f"results/tiny/runs/a/{name}" for name in ("along/40/proof.json", "earlier/0123456789ab/train.json")
    } <= set(bundled(asked))


def test_runs_that_the_sweep_leaves_out_are_named(asked):
    assert b"Left out" not in bundled(asked)["README.md"]
    path = asked.results / "specs" / "report.json"
    write(path, ReportSpec(title=None, agreements=(), proofs=(), excluded=("b", "c")))
    assert b"\n\nLeft out of the sweep: b, c.\n\n" in bundled(asked)["README.md"]


def test_scripts_and_tables_that_the_configuration_names_are_in_it(asked, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("elsewhere") / "score.py"
    for name in ("evals/run.py", "tasks.yaml", "paper.yaml", "prof.py", "keep.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {path.name}")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "tool").write_text("x")
    (tmp_path / "large.bin").write_bytes(bytes(LARGEST + 1))
    outside.write_text("1")
    command = f"python evals/run.py --tasks='tasks.yaml' {outside} .venv/tool large.bin /bin/ls {{model}} > {{out}}"
    command += f" ~nobody-here/x.py {'x' * 1000}"  # words that can't be paths
    write_json(asked.results / "specs" / "evaluate.json", {"command": command})
    write_json(asked.results / "runs" / "a" / "profile.json", {"tool": "prof.py"})
    write(asked.results / "specs" / "corpora" / "c.json", made.corpus_spec(filter="keep.py"))
    (tmp_path / "tiny.yaml").write_text("report: {compare_to: paper.yaml}\n")
    files = bundled(asked)
    for name in ("evals/run.py", "tasks.yaml", "paper.yaml", "prof.py", "keep.py"):
        assert files[name] == f"# {Path(name).name}".encode()
    assert "profilers/cprofile.py" in files and ".venv/tool" not in files and "large.bin" not in files
    needed = json.loads(files["bundle.json"])["needed"]
    assert [(Path(one["path"]).name, one["bytes"]) for one in needed] == [("score.py", 1), ("large.bin", LARGEST + 1)]
    assert needed[0]["sha256"] == hashlib.sha256(b"1").hexdigest()


@pytest.mark.parametrize("name", ["evaluation.json", "along/3/evaluation.json"])
def test_a_script_that_was_edited_after_its_evaluation_stops_the_bundle(asked, name):
    """Evaluations of older versions don't say what made them."""
    script, record = Path("score.py"), asked.results / "runs" / "a" / name
    script.write_text("1")
    command = "python score.py {model} {out}"
    write(asked.results / "specs" / "evaluate.json", EvaluateSpec(command=command))
    write(record, made.evaluation(command=command, files=files_of(command, Path("results"))))
    assert bundled(asked)["score.py"] == b"1"
    script.write_text("2")
    with pytest.raises(InputError, match=rf"^evaluate\.command: score\.py was edited after .*{name} was made with it"):
        bundled(asked)
    script.unlink()
    with pytest.raises(InputError, match=rf"^evaluate\.command: score\.py was removed after .*{name} was made with it"):
        bundled(asked)
    script.write_text("2")
    write(record, made.evaluation(command=command))
    assert bundled(asked)["score.py"] == b"2"


def test_files_that_the_evaluation_writes_are_not_in_it(asked):
    for name in ("my score.py", "eval.log"):
        write_text(name, name)
    command = "python 'my score.py' --log eval.log {model} {out}"
    write(asked.results / "specs" / "evaluate.json", EvaluateSpec(command=command))
    record = made.evaluation(command=command, written=("eval.log",))
    write(asked.results / "runs" / "a" / "evaluation.json", record)
    assert bundled(asked).keys() & {"my score.py", "eval.log"} == {"my score.py"}


def test_results_that_the_evaluations_command_names_dont_stop_the_bundle(asked):
    """Their digests were recorded, and compared with none."""
    made_by_us = asked.results / "report" / "made.json"
    write_text(made_by_us, "{}")
    command = f"sh score.sh {made_by_us} {{model}} {{out}}"
    write_text("score.sh", "1")
    files = files_of(command, asked.results.parent)
    assert files.keys() == {"score.sh"}
    write(asked.results / "runs" / "a" / "evaluation.json", made.evaluation(command=command, files=files))
    write_text(made_by_us, "[]")
    assert "bundle.json" in bundled(asked)


def test_data_that_is_not_in_it_is_listed(asked, tmp_path):
    specs, model = asked.results / "specs", tmp_path / "model"
    model.mkdir()
    listed = {"path": f"{tmp_path}/a.jsonl", "kind": "jsonl", "size": 3, "sha256": "1"}
    write(specs / "corpora" / "text.json", made.corpus_spec(source=[f"{tmp_path}/*.jsonl", "python-stdlib"]))
    frozen = FrozenTokenizer(path="t", digest="1", file="t.json", size=1, eos=None, bos=None)
    sources = tuple(SourceFile(**{**listed, "kind": kind}) for kind in ("jsonl", "source"))
    listing = Sources(name="text", files=sources, tokenizer=frozen, identity={}, folder="store/corpora/text")
    write(asked.results / "data" / "text" / "sources.json", listing)
    write(specs / "corpora" / "new.json", made.corpus_spec(source=["b.txt", "hf:a/b"], tokenizer={"path": str(model)}))
    write(specs / "models" / "dense.json", made.model_spec(hf=str(model)))
    write(specs / "models" / "hub.json", made.model_spec(hf="owner/name"))
    write(asked.results / "models" / "dense" / "source.json", made.source(digest="2"))
    assert json.loads(bundled(asked)["bundle.json"])["needed"] == [
        {"for": "corpora.new", "path": "b.txt"},
        {"for": "corpora.text", "path": "./a.jsonl", "bytes": 3, "sha256": "1"},
        {"for": "models.dense.hf", "path": "./model", "digest": "2"},
        {"for": "corpora.new.tokenizer", "path": "./model"},
    ]


def test_what_ran_is_listed_and_not_what_is_installed_now(asked, tmp_path):
    def ran(*names):
        ran_on = [{"environment": name, "bridge": "0.6", "code": CODE} for name in names]
        lines = [{"event": "start", "attempt": n, "ran_on": one} for n, one in enumerate(ran_on, start=1)]
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "store" / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return json.loads(bundled(asked)["bundle.json"])

    old = {"python": "3.11.0", "packages": {"torch": "1.0"}}
    write_json(tmp_path / "store" / "environments" / "a.json", old)
    write_json(tmp_path / "store" / "environments" / "b.json", {"python": "3.12.0", "packages": {"torch": "2.0"}})
    said = ran("a", "a")
    assert said["environment"]["of"] == "the runs" and said["environment"]["packages"] == {"torch": "1.0"}
    assert said["environment"]["python"] == "3.11.0" and said["environments"] == {"a": old}
    assert said["ran_on"] == {"a": [{"environment": "a", "bridge": "0.6", "code": CODE, "attempts": [1, 2]}]}
    said = ran("a", "b")
    assert set(said["environments"]) == {"a", "b"} and said["environment"]["of"] == "the bundle's making"
    assert said["environment"]["packages"]["pytest"] == pytest.__version__
    assert ran(None)["environments"] == {}
