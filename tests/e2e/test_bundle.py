"""A bundle of a real experiment: nothing of the machine and no secret in it, and all of it can be made again."""

import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from clone import Workspace, copy_repository, edit, user_environment

from megaboa.bundle.archive import Archive, pack
from megaboa.bundle.crate import METADATA
from megaboa.files import file_digest
from megaboa.secrets import is_secret_name

pytestmark = pytest.mark.slow

USER = "zacharias"
NEEDLE = f"secret-{secrets.token_hex(8)}"  # not written down here: the clone has this file too
VARIABLES = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HF_API_TOKEN", "WANDB_API_KEY", "COMET_API_KEY"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_TOKEN", "SOME_TOKEN"),
    *("MLFLOW_TRACKING_PASSWORD", "GITHUB_TOKEN", "AZURE_STORAGE_KEY", "SOME_API_KEY", "SOME_PASSWORD", "SOME_SECRET"),
)
TEMPLATE = "config/experiments/templates/chatml.jinja"
RUNS = {
    "dp1": "{training.seed: 7}",
    "dp2": "{resources.gpus_per_node: 2, training.seed: 7}",
    "sft": f"{{task: sft, data.blend: chats, tuning.template: {TEMPLATE}, training.seed: 7, training.seq_length: 256}}",
}
MORE = """\
export: {runs: [dp1]}
evaluate: {command: 'ls {model} | wc -l > {out}'}
report: {agreements: [{reference: dp1, runs: [dp2]}]}
"""


class Shell:
    """A person's clone below a home folder of that person's, and secrets in the environment."""

    def __init__(self, home: Path):
        self.home = home
        self.workspace = Workspace(copy_repository(home / "megaboa"))
        self.secrets = {name: f"{NEEDLE}-{name.lower()}" for name in VARIABLES}
        person = {"HOME": str(home), "LOGNAME": USER, "USER": USER}
        self.environment = {**user_environment(), **person, **self.secrets}

    def run(self, *command: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=self.workspace.path,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def snakemake(self, *arguments: str) -> str:
        return self.run("-m", "snakemake", "--cores", "2", *arguments)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("home") / USER)
    shell.workspace.experiment("small", RUNS, steps=4, save_interval=4, more=MORE)
    source = shell.workspace.path / "small.yaml"
    chats = "limit: 60}\n  chats: {source: python-stdlib, prompt: question, answer: answer, limit: 200}\n"
    edit(source, "limit: 60}\n", chats)
    edit(source, 'data: {split: "90,5,5"}', 'data: {split: "90,5,5", blend: text}')
    source.write_text(source.read_text() + f"# written by hand in {shell.workspace.path}\n")
    shell.snakemake("bundle", "--configfile", "small.yaml", "--config", "training={eval_interval: 2}")
    return shell


@pytest.fixture(scope="module")
def bundle(shell):
    return shell.workspace.results("small", "bundle", "small.crate.zip")


@pytest.fixture(scope="module")
def files(bundle):
    return Archive(bundle)


def test_it_holds_what_a_reader_needs(files):
    wanted = ["ro-crate-metadata.json", "README.md", "LICENSE", "Snakefile", "small.yaml", "config/command-line.yaml"]
    wanted += ["envs/pipeline.txt", "envs/runtime-cpu.txt", "bundle.json", "results/small/plan.tsv"]
    wanted += [f"results/small/runs/{run}/{name}" for run in RUNS for name in ("run.json", "metrics/steps.parquet")]
    wanted += [f"results/small/report/{name}" for name in ("index.html", "checks.json", "loss.pdf", "data/loss.tsv")]
    wanted += ["results/small/runs/dp1/evaluation.json", "results/small/report/tables/evaluation.tex"]
    wanted += ["results/small/image.json", "results/small/data/text.json", "results/small/models/dense/proof.json"]
    assert set(wanted) <= set(files)
    assert not [name for name in files if name.startswith(("store/", "profiles/slurm", ".git"))]
    assert json.loads(files["results/small/runs/dp1/evaluation.json"])["values"] == {"value": 6}  # files of the export
    manifest = json.loads(files["bundle.json"])
    assert manifest["seeds"] == {"dp1": 7, "dp2": 7, "sft": 7} and manifest["device"] == ["cpu"]
    assert manifest["config"] == ["small.yaml", "config/command-line.yaml"]
    assert manifest["environment"]["packages"]["snakemake"] and manifest["image"]["digest"]
    entities = {entity["@id"] for entity in json.loads(files["ro-crate-metadata.json"])["@graph"]}
    assert set(files) - {"ro-crate-metadata.json"} <= entities


def test_of_a_tuned_run_it_holds_the_template_and_what_was_read(shell, files):
    template = (shell.workspace.path / TEMPLATE).read_text()
    run, launch = (json.loads(files[f"results/small/runs/sft/{name}.json"]) for name in ("run", "launch"))
    assert run["tuning"]["template"] == template == files[TEMPLATE].decode()
    examples = json.loads(files["results/small/data/chats.json"])["examples"]
    assert (examples["kind"], examples["count"]) == ("pairs", 200) and len(examples["sha256"]) == 64
    read = json.loads(files[f"results/small/data/indexes/{launch['index']}.json"])["examples"]
    assert read["examples"] == 180 and 0 < read["counted"] < read["tokens"]


def test_nothing_in_it_says_where_it_was_made(shell, files):
    words = [str(shell.home).encode(), str(shell.workspace.path).encode(), USER.encode()]
    hosts = (
        rb"(?<![\w.-])(" + "|".join({socket.gethostname(), socket.getfqdn()} - {"localhost"}).encode() + rb")(?![\w.-])"
    )
    for name, content in files.items():
        assert not [word for word in words if word in content], name
        if Path(name).suffix not in (".png", ".pdf", ".parquet"):  # a short name stands in compressed bytes by chance
            assert not re.search(hosts, content), name


def test_the_same_results_are_the_same_archive(shell, bundle):
    before = file_digest(bundle)
    bundle.unlink()
    shell.snakemake("bundle", "--configfile", "small.yaml", "--config", "training={eval_interval: 2}")
    assert file_digest(bundle) == before


def test_snakemakes_own_report_has_the_page_and_the_runs(shell):
    shell.snakemake("--configfile", "small.yaml", "--config", "training={eval_interval: 2}", "--report", "own.html")
    html = (shell.workspace.path / "own.html").read_text()
    for text in ("index.html", "Experiment", "Run dp2 in numbers", "What run dp1 did with every second"):
        assert text in html


def test_no_secret_is_in_any_file_that_the_pipeline_wrote(shell, bundle):
    """Results, stores, logs, .snakemake, report, the bundle packed and unpacked, and the whole home folder."""
    assert all(is_secret_name(name) for name in VARIABLES)
    written = [path for path in shell.home.rglob("*") if path.is_file() and not path.is_symlink()]
    folders = {path.relative_to(shell.workspace.path).parts[0] for path in written if "megaboa" in path.parts}
    assert {"results", "store", ".snakemake"} <= folders
    needle = NEEDLE.encode()
    assert [path for path in written if needle in path.read_bytes()] == []
    assert [name for name, content in Archive(bundle).items() if needle in content] == []


def test_a_secret_that_was_written_into_the_configuration_stops_the_bundle(shell, bundle):
    source = shell.workspace.path / "small.yaml"
    text = source.read_text()
    source.write_text(f"{text}# {shell.secrets['HF_TOKEN']}\n")
    command = ["workflow/scripts/megaboa", "bundle", "--settings", "results/small/specs/report.json"]
    command += ["--store", "store", "--config-file", "small.yaml", "--out", "x.zip"]
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=shell.workspace.path, env=shell.environment, capture_output=True, text=True
        )
    finally:
        source.write_text(text)
    assert done.returncode == 1 and "small.yaml: holds the value of HF_TOKEN" in done.stderr
    assert shell.secrets["HF_TOKEN"] not in done.stderr and not (shell.workspace.path / "x.zip").exists()


def test_figures_and_runs_are_made_again_from_the_bundle_alone(shell, bundle, tmp_path_factory):
    """In another clone: identical losses, identical figures' data, the same exported weights."""
    elsewhere = Workspace(copy_repository(tmp_path_factory.mktemp("reader")))
    done = subprocess.run(
        [sys.executable, "workflow/scripts/megaboa", "reproduce", bundle],
        cwd=elsewhere.path,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    figures, runs = lines[: lines.index("runs from the bundle's configuration:")], lines[len(lines) // 2 :]
    assert [line for line in figures if line.split() == ["equal", "results/small/report/data/loss.tsv"]]
    assert [line for line in figures if line.split() == ["equal", "results/small/report/loss.svg"]]
    assert "different" not in done.stdout and "missing" not in done.stdout
    for run in RUNS:
        [line] = [line for line in lines if line.endswith(f"runs/{run}/metrics/steps.parquet")]
        assert line.split()[0].startswith("equal"), runs
    assert [line for line in lines if line.split() == ["equal", "results/small/runs/dp1/export.json"]]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("report/data/loss.tsv", "report/data/loss.tsv"),
        ("report/tables/runs.tsv", "report/tables/runs.tsv"),
        ("report/index.html", "report/index.html"),
        ("runs/dp1/metrics/summary.json", "report/tables/runs.tsv"),  # which is made of it
        ("runs/dp1/evaluation.json", "report/tables/evaluation.tsv"),
    ],
)
def test_a_number_that_was_changed_is_found(bundle, tmp_path, changed, found):
    files = dict(Archive(bundle))
    changed, found = f"results/small/{changed}", f"results/small/{found}"
    number = rb"(?<=\"value\": )6" if changed.endswith("evaluation.json") else rb"(?<=[\s>])[5-9]\.(?=\d\d)"
    before, files[changed] = files[changed], re.sub(number, b"4.", files[changed], count=1)
    if changed.endswith("evaluation.json"):
        files[changed] = files[changed].replace(b"4.", b"4")
    assert files[changed] != before
    sums = [hashlib.sha256(content).hexdigest().encode() for content in (before, files[changed])]
    files[METADATA] = files[METADATA].replace(*sums)
    (tmp_path / "forged.zip").write_bytes(pack(files))
    megaboa = Path(__file__).parents[2] / "workflow" / "scripts" / "megaboa"
    command = [sys.executable, megaboa, "reproduce", "forged.zip", "--figures-only"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.endswith(found)]
    assert line.split()[0] == "different"


def test_a_bundle_is_a_baseline_and_agrees_with_itself(shell, bundle):
    """But a run that was not trained again is no evidence. The report can be made again without the earlier bundle."""
    earlier = shell.workspace.path / "earlier.zip"
    earlier.write_bytes(bundle.read_bytes())
    assert "PASS: compared/index.html" in shell.run("workflow/scripts/megaboa", "compare", bundle, "earlier.zip")
    baseline = ["training={eval_interval: 2}", "report={baseline: {path: earlier.zip}}"]
    shell.snakemake("bundle", "--configfile", "small.yaml", "--config", *baseline)
    checks = json.loads(shell.workspace.results("small", "report", "checks.json").read_text())["checks"]
    found = {one["run"]: (one["state"], one["detail"]) for one in checks if one["kind"] == "baseline"}
    why = "is the very run of the baseline: it was not trained again, so there is nothing to compare"
    assert found == {run: ("NOT_RUN", f"{run} {why}") for run in RUNS}
    earlier.unlink()
    done = shell.run("workflow/scripts/megaboa", "reproduce", bundle, "--figures-only", "--into", "again")
    assert "results/small/report/checks.json" in done and "different" not in done


def test_bisect_finds_the_first_learning_rate_that_raises_the_loss(shell):
    """Its corpus, tokenizer and model are in the store. A second call trains nothing."""
    shell.workspace.experiment("hunt", {"one": "{training.seed: 7}"}, steps=4, save_interval=4)
    command = ["workflow/scripts/megaboa", "bisect", "hunt.yaml", "--key", "optimizer.lr"]
    command += ["--values", "0.001", "-1", "0.0010001", "0.5", "--spread", "0.001", "--higher-loss", "0.02"]
    command += ["--slower", "100", "--more-memory", "100", "--", "--cores", "2"]
    lines = shell.run(*command).splitlines()
    assert lines[0] == "good    0.001" and lines[1] == "bad     0.5"
    assert lines[-3:] == ["broken  -1", "good    0.0010001", "first bad optimizer.lr: 0.5"]
    attempts = {
        path: path.stat().st_mtime_ns for path in shell.workspace.path.glob("store/runs/hunt*/*/*/attempts.jsonl")
    }
    assert len(attempts) == 3
    assert shell.run(*command).splitlines() == lines
    assert {path: path.stat().st_mtime_ns for path in attempts} == attempts
