"""Stages before training that failed are explained by their logs."""

import contextlib
import fcntl
import os
import subprocess
import sys

import made
import pytest

from megaboa.doctor import failed_stages
from megaboa.files import write_json
from megaboa.records import plain

# With no network, and as the hub answers for a model whose licence was not accepted.
FETCH = """
from megaboa.data import hub
from megaboa.errors import one_sentence
with one_sentence():
    hub.download("meta-llama/Llama-3.1-8B", None, ["*.json"], "models.llama.hf")
"""
REFUSE = """
import httpx
from huggingface_hub import errors
from megaboa.data import hub
from megaboa.errors import one_sentence
with one_sentence(), hub.refusals("models.llama.hf: 'meta-llama/Llama-3.1-8B'", "meta-llama/Llama-3.1-8B"):
    raise errors.GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "https://x.y")))
"""
GATED = """Traceback (most recent call last):
  File "models.py", line 22, in get_model
huggingface_hub.errors.GatedRepoError: 403 Client Error. (Request ID: Root=1)
"""
PREFLIGHT = """run  state  ranks  layout
a    FAIL       4  pp4
warning: run b: parallel.tp: 2
run a is refused: parallel.pp: 36 layers can't be divided over pp * vpp = 8 * 1 stages [layers_fill_the_stages]
1 of 6 runs could never work; nothing was trained.
"""
UNREAD = """warning: run b: parallel.tp: 2
error: run a is not checked: models.a.recipe: 'o/n': the hub refuses it: check HF_TOKEN, or run `hf auth login`
"""
IMAGE = "error: container.image: nvcr.io/x:1 can't be fetched: unauthorized: authentication required\n"


@pytest.fixture
def results(tmp_path):
    for spec in ("models/llama", "corpora/text", "tokenizers/bpe", "indexes/0a1b"):
        write_json(tmp_path / "specs" / f"{spec}.json", {})
    return tmp_path


def log(results, name, text):
    path = results / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nothing_is_said_before_anything_is_made(results):
    assert failed_stages.failed(results) == []


@pytest.mark.parametrize("program", [FETCH, REFUSE])
def test_a_model_that_the_hub_does_not_give(results, program):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(results / "hf")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr.startswith("error: models.llama.hf")
    path = log(results, "models/llama.source", done.stderr)
    lines = failed_stages.failed(results)
    assert lines[:3] == ["models/llama.source: hub", f"  | {done.stderr.strip()}", f"  logs: {path}"]
    assert any("HF_TOKEN" in line for line in lines)


def test_a_traceback_that_names_the_hub(results):
    write_json(results / "models/llama/source.json", {})
    log(results, "models/llama.import", GATED)
    assert failed_stages.failed(results)[:2] == ["models/llama.import: hub", f"  | {GATED.splitlines()[-1]}"]


def test_a_manifest_that_is_there_says_that_it_went_well(results):
    log(results, "models/llama.source", GATED)
    write_json(results / "models/llama/source.json", {})
    assert failed_stages.failed(results) == []


def test_a_model_that_is_no_longer_asked_for_is_forgotten(results):
    log(results, "models/llama.source", GATED)
    (results / "specs/models/llama.json").unlink()
    assert failed_stages.failed(results) == []


def test_an_image_that_cannot_be_fetched(results):
    path = log(results, "image", IMAGE)
    assert failed_stages.failed(results) == ["image: failed", f"  | {IMAGE.strip()}", f"  logs: {path}"]


def test_what_preflight_refused_with_its_reasons(results):
    path = log(results, "preflight", PREFLIGHT)
    reason, count = PREFLIGHT.splitlines()[-2:]
    assert failed_stages.failed(results) == ["preflight: refused", f"  | {reason}", f"  | {count}", f"  logs: {path}"]


def test_what_preflight_could_not_read(results):
    path = log(results, "preflight", UNREAD)
    lines = failed_stages.failed(results)
    assert lines[:3] == ["preflight: hub", f"  | {UNREAD.splitlines()[1]}", f"  logs: {path}"]
    assert any("HF_TOKEN" in line for line in lines[3:])


def test_what_was_refused_in_an_image_is_told_as_long_as_there_is_one(results):
    said = "run a is refused in the image: model.fp8: the image has no transformer_engine"
    path = log(results, "preflight-in-image", said)
    write_json(results / "specs" / "inside.json", {"container": plain(made.image_start())})
    assert failed_stages.failed(results) == ["preflight-in-image: refused", f"  | {said}", f"  logs: {path}"]
    write_json(results / "specs" / "inside.json", {"digest": "packages"})
    assert failed_stages.failed(results) == []


def test_an_error_in_the_words_of_a_rank(results):
    log(results, "data/text/merge", "[rank0]: Traceback (most recent call last):\n[rank0]: AttributeError: no weight\n")
    assert failed_stages.failed(results)[0] == "data/text/merge: failed"
    assert any("AttributeError: no weight" in line for line in failed_stages.failed(results))


@pytest.mark.parametrize(
    "name", ["tokenizers/bpe", "data/text/sources", "data/text/shard-0-of-1", "data/text/merge", "data/indexes/0a1b"]
)
def test_data_that_could_not_be_made(results, name):
    log(results, name, "OSError: [Errno 28] No space left on device\n")
    assert failed_stages.failed(results)[0] == f"{name}: disk full"


@pytest.mark.parametrize(
    "said",
    [
        "corpora.chats: nothing in the chat template says which tokens are the assistant's: put {% generation %} and "
        "{% endgeneration %} around what it says, in tuning.template of run a",
        "corpora.chats: not one token of the answers would count in the loss: the chat template marks none, or "
        "training.seq_length cuts all of them off: correct tuning.template of run a, or raise it",
    ],
)
def test_a_template_that_is_wrong_is_told_in_its_own_words(results, said):
    program = "import sys; from megaboa.errors import InputError, one_sentence\nwith one_sentence(): raise InputError("
    done = subprocess.run([sys.executable, "-c", f"{program}{said!r})"], capture_output=True, text=True)
    path = log(results, "data/indexes/0a1b", f"reading examples\n{done.stderr}")
    assert failed_stages.failed(results) == ["data/indexes/0a1b: failed", f"  | error: {said}", f"  logs: {path}"]


def test_a_stage_that_is_at_work_has_not_failed(results):
    write_json(results / "models/llama/source.json", {})
    path = log(results, "models/llama.import", "Loading from meta-llama/Llama-3.1-8B: 12%\nINFO: no error: so far\n")
    with worked_on(results):
        assert failed_stages.failed(results) == []
    assert failed_stages.failed(results) == [f"models/llama.import: {SILENT.format('import.json')}", f"  logs: {path}"]


def test_where_a_scheduler_has_logged_it_is_named(results, monkeypatch):
    monkeypatch.chdir(results)
    log(results, "tokenizers/bpe", "")
    (results / "logs" / "slurm").mkdir()
    assert "It was killed, SLURM ended it (its own log: logs/slurm), or the file" in failed_stages.failed(results)[0]


@pytest.mark.parametrize("name", ["tokenizers/bpe", "data/text/shard-0-of-2"])
@pytest.mark.parametrize(
    "text",
    ["1 of 2 files\ninterrupted: tokenize-shard; the same call makes it again\n", "Traceback:\nKeyboardInterrupt\n"],
)
def test_what_ctrl_c_interrupted(results, name, text):
    log(results, name, text)
    said = [f"{name}: was interrupted, as by Ctrl-C; the same call makes it again"]
    assert failed_stages.failed(results) == said


def test_a_shard_that_is_not_merged_has_not_failed(results):
    log(results, "data/text/shard-0-of-2", "1 of 2 files\n")
    assert failed_stages.failed(results) == []


SILENT = "{} is missing, and the log has no error. It was killed or the file was removed; the same call makes it again"
PROOF = """\
PASS export of run a: files: 9 of 9 are as they were written
FAIL export of run a: tensors: 20 of 21 tensors have their name, shape and type; missing: lm_head.weight
error: export of run a: 1 of 2 checks failed: tensors; to export it again, remove store/exports/x/a/1
"""


@contextlib.contextmanager
def worked_on(results):
    """As a call of Snakemake holds the experiment."""
    with (results / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture
def trained(results):
    """One run, trained."""
    write_json(results / "specs" / "runs.json", {"runs": ["a"]})
    write_json(results / "runs" / "a" / "train.json", {})
    return results


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("export/a", []),
        ("export/a.proof", ["export"]),
        ("export/a.generate", ["export"]),
        ("export/a.push", ["export", "proof"]),
        ("evaluate/a", ["export", "proof"]),
        ("profiles/a", []),
        ("profiles/a.analysis", ["trace"]),
    ],
)
def test_what_is_made_of_a_run_is_told_when_it_has_begun(trained, name, needs):
    for need in needs:
        assert failed_stages.failed(trained) == []
        write_json(trained / "runs" / "a" / f"{need}.json", {})
    path = log(trained, name, "ValueError: hf_path is required\n")
    assert failed_stages.failed(trained) == [
        f"{name}: failed",
        "  | ValueError: hf_path is required",
        f"  logs: {path}",
    ]
    path.write_text("all is well so far\n")
    [manifest] = [job.manifest.name for job in failed_stages.jobs(trained) if job.log == path]
    assert failed_stages.failed(trained) == [f"{name}: {SILENT.format(manifest)}", f"  logs: {path}"]


def test_a_log_that_is_older_than_what_the_job_needs_is_of_an_earlier_one(trained):
    path = log(trained, "export/a.proof", "ValueError: of yesterday\n")
    os.utime(path, (1, 1))
    write_json(trained / "runs" / "a" / "export.json", {})
    assert failed_stages.failed(trained) == []


def test_the_checks_that_a_proof_failed_are_named(trained):
    write_json(trained / "runs" / "a" / "export.json", {})
    log(trained, "export/a.proof", PROOF)
    said = failed_stages.failed(trained)
    assert said[0] == "export/a.proof: failed"
    assert said[1:3] == [f"  | {line}" for line in PROOF.splitlines()[1:]]


def test_an_error_is_told_with_what_it_announces_and_ours_with_its_remedy(results):
    log(
        results,
        "models/llama.source",
        "[rank0]: ValueError: Shape of x:\n[rank0]:   is: 3\n  was: 4\nShutting down\n",
    )
    assert "  | ValueError: Shape of x: is: 3 was: 4" in failed_stages.failed(results)
    sentence = f"error: {'a long path ' * 40}was changed. Remove it, and call again"
    log(results, "models/llama.source", f"{sentence}\n")
    assert f"  | {sentence}" in failed_stages.failed(results)
