"""megaboa.records: one reader and writer, versions, and the files of older versions."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from made import trained

from megaboa import records
from megaboa.files import link, read_json, read_jsonl, write_json
from megaboa.observe import goodput, measure
from megaboa.observe.steps import read_events
from megaboa.paths import RunFolder
from megaboa.records import (
    LEDGER,
    STEPS,
    AttemptEnd,
    AttemptStart,
    Called,
    Evaluated,
    Record,
    RecordError,
    Step,
    TrainRecord,
    base,
    plain,
)
from megaboa.run import completion, identity, ledger, progress, supervisor, unfinished
from megaboa.store_paths import RunStore

# Written by the first version whose manifests had no version; only lists that nobody reads here were shortened.
VERSION_0 = Path(__file__).parent / "fixtures" / "version-0"
IDENTITY = "e5433a0e35aa8a8fadc73cc6d06c949bef4a2dabf619a13305a339c534037f48"

KINDS = [kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, Record)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newer(TrainRecord):
    VERSION = 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train.json"


def test_what_is_written_is_read(path):
    record = trained(skipped=((40, 45),), checkpoints=(records.Kept(iteration=10, bytes=7),))
    records.write(path, record)
    assert records.read(TrainRecord, path) == record
    assert read_json(path)["skipped"] == [[40, 45]] and read_json(path)["parent"] is None


def test_a_file_without_a_version_has_version_0_and_the_writer_leaves_it_so(path):
    records.write(path, trained())
    assert "version" not in read_json(path)
    assert records.read(Newer, path).run == "a"


def test_a_newer_version_is_refused_in_a_sentence(path):
    records.write(path, Newer(**vars(trained())))
    assert read_json(path)["version"] == 2
    with pytest.raises(RecordError) as error:
        records.read(TrainRecord, path)
    assert str(error.value) == (
        f"{path}: has version 2, and this Megaboa reads TrainRecord up to version 0: use the Megaboa that wrote it, "
        "or a newer one"
    )


@pytest.mark.parametrize("version", ["1", None, -1, 3, 1.5])
def test_a_version_that_nobody_knows_is_refused(path, version):
    write_json(path, plain(trained()) | {"version": version})
    with pytest.raises(RecordError, match="has version"):
        records.read(Newer, path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1], "it holds something else"),
        ({"run": "a", "identity": "1", "store": "s"}, "it lacks train_iters and iteration and world_size"),
        (
            plain(trained()) | {"checkpoints": 3},
            r"can't be read as TrainRecord \(checkpoints is 3, not a list\): remove it",
        ),
        (plain(trained()) | {"run": None}, r"\(run is None, not text\)"),
        (
            plain(trained()) | {"checkpoints": [{"iteration": 1, "bytes": 2}, {}]},
            r"\(checkpoints\[1\] lacks iteration and bytes\)",
        ),
        (plain(trained()) | {"skipped": [[1, "2"]]}, r"\(skipped\[0\]\[1\] is '2', not a number\)"),
        (plain(trained()) | {"parent": 3}, r"\(parent is 3, not a mapping or null\)"),
    ],
)
def test_what_is_no_record_is_named(path, values, said):
    write_json(path, values)
    with pytest.raises(RecordError, match=said) as error:
        records.read(TrainRecord, path)
    assert str(error.value).startswith(f"{path}: ")


def test_null_stands_for_a_default(path):
    """Also for a number that isn't finite."""
    write_json(path, plain(trained()) | {"skipped": None, "parent": None, "bytes": None})
    record = records.read(TrainRecord, path)
    assert (record.skipped, record.parent, record.bytes) == ((), None, None)


def test_keys_that_are_not_known_are_kept_where_a_file_is_written_again(path):
    write_json(path, plain(trained()) | {"colour": "blue"})
    records.write(path, dataclasses.replace(records.read(TrainRecord, path), iteration=11))
    assert read_json(path)["colour"] == "blue" and read_json(path)["iteration"] == 11


def test_a_file_that_is_not_there_is_none(path):
    assert records.read_if_there(TrainRecord, path) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_type_of_a_field_can_be_read(kind):
    assert base._fields(kind) is not None and base._written(kind) is not None


def test_lines_say_what_happened(tmp_path):
    path = tmp_path / "attempts.jsonl"
    told = [Called(job="17", excluded=("n7",)), AttemptStart(attempt=1, nodes=("n1",)), AttemptEnd(attempt=1)]
    for event in told:
        ledger.append(path, event)
    with path.open("a") as stream:
        stream.write('{"event": "of the future", "time": 1.0}\n{"event": "en')
    assert records.read_ledger(path) == told
    assert [line["event"] for line in read_jsonl(path)] == ["call", "start", "end", "of the future"]


def test_a_line_of_a_newer_version_is_refused_with_the_name_of_its_file(tmp_path):
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"event": "start", "attempt": 1, "time": 1.0, "version": 1}\n')
    with pytest.raises(RecordError, match=r"attempts.jsonl: has version 1"):
        records.read_ledger(path)


def test_of_a_line_that_lacks_something_the_ledger_is_kept(tmp_path):
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"event": "start", "time": 1.0}\n')
    said = r"attempts.jsonl: has a line 'start' that can't be read \(it lacks attempt\): repair or remove that line"
    with pytest.raises(RecordError, match=said):
        records.read_ledger(path)


def test_a_step_knows_its_attempt_by_its_folder(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(records.line(Step(step=3, loss=float("nan"))) + "\n")
    assert "attempt" not in read_jsonl(path)[0]
    (step,) = records.read_steps(path, 2)
    assert step.attempt == 2 and step.loss != step.loss


# What the version before this one left


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The folder of a run that was trained before there were records, with its store."""
    shutil.copytree(VERSION_0, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("results/tiny/runs/dp2"))
    link(RunStore(folder.store).ledger, folder.attempts_link)
    return folder


def test_a_run_of_version_0_is_the_same_run_and_is_not_trained_again(old):
    assert identity.identity_of(old).digest == IDENTITY
    store = identity.store_of(old, identity.identity_of(old))
    assert str(store.path) == f"store/runs/tiny/dp2/{IDENTITY[:12]}" and store.identity.exists()
    assert identity.is_trained(old) and not identity.is_outdated(old, store)
    assert completion.finished(old, store) and not unfinished.other_work(old)
    assert progress.read_progress(store.path, run="dp2").state == "done"
    made = supervisor.manifest_of(old, store, identity.identity_of(old))
    assert plain(made) == read_json(old.train_manifest), "written again, it is the same"


def test_metrics_of_version_0_come_out_the_same(old):
    store, before = RunStore(old.store), read_json(old.summary)
    summary = plain(measure.trained(old).summary)
    assert {key: summary[key] for key in before} == before
    spent = goodput.goodput(records.read_ledger(store.ledger), read_events(store), measure.trained(old).rows)
    assert plain(spent) == {key: value for key, value in read_json(old.goodput).items() if key != "rank_hours"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (records.LaunchSpec, "results/tiny/runs/dp2/launch.json"),
        (records.ProfileSpec, "results/tiny/runs/dp2/profile.json"),
        (records.TrainRecord, "results/tiny/runs/dp2/train.json"),
        (records.Tokenizer, "results/tiny/tokenizers/bpe512.json"),
        (records.Corpus, "results/tiny/data/stdlib.json"),
        (records.ModelSource, "results/tiny/models/dense/source.json"),
        (records.ImportRecord, "results/tiny/models/dense/import.json"),
        (records.Proof, "results/tiny/models/dense/proof.json"),
        (records.ExportRecord, "results/tiny/runs/scratch/export.json"),
        (records.Proof, "results/tiny/runs/scratch/proof.json"),
        (records.Found, f"store/runs/tiny/dp2/{IDENTITY[:12]}/found.json"),
        (records.Goodput, "results/tiny/runs/dp2/metrics/goodput.json"),
        (records.CheckpointMark, f"store/runs/tiny/dp2/{IDENTITY[:12]}/checkpoints/iter_0000010/complete.json"),
        (records.RankEnd, f"store/runs/tiny/dp2/{IDENTITY[:12]}/attempts/01/end/0.json"),
    ],
)
def test_a_file_of_version_0_is_written_again_as_it_was(kind, name):
    written, again = read_json(VERSION_0 / name), plain(records.read(kind, VERSION_0 / name))
    for part in ("recovery", "start"):  # they have more keys today
        if part in again:
            again[part] = {key: again[part][key] for key in written[part]}
    assert again == written


FILE = {"path": "a.jsonl", "kind": "jsonl", "packed": None, "size": 3, "changed": 7, "sha256": "1", "stream": None}
FROM_HUB = {"id": "a/b", "subset": None, "split": "train", "revision": "1", "number": 0, "count": 2}
FROZEN = {"path": "t", "digest": "1", "file": "t.json", "size": 300, "eos": 0, "bos": None}
TEXT = {"name": "c", "source": ["a.jsonl"], "text_key": ["q", "a"], "separator": None, "subset": None, "limit": None}
TEXT |= {"split": "train", "revision": None, "max_document_mb": 128, "on_bad_record": "error"}
COLUMN = {"documents": 9, "tokens": 90, "text_bytes": 300, "empty": 0, "dropped": {"blank": 1}, "lengths": [0, 9]}
BAD, COMPARED = {"records": 1, "samples": ["a.jsonl:3: no key"]}, {"documents": 9, "characters": 99}
MADE = {"dtype": "uint16", "bad": BAD, "refused": None, "compared": COMPARED}
AGREEMENT = {"reference": "a", "runs": ["b"], "tolerance": 1e-5, "grad_norm_tolerance": None}
DATASET = {"key": "q", "documents": 9, "tokens": 90, "bytes_per_token": 3.3, "largest_token": 299, "dropped": {}}
DATASET |= {"sizes": {"c.bin": 180}, "sha256": {"c.bin": "1"}, "lengths": [0, 9]}


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (records.CorpusSpec, {**TEXT, "store": "store", "tokenizer": {"kind": "path", "path": "t"}, "encoder": "auto"}
         | {"min_characters": 0, "deduplicate": False, "append_eod": True, "prepend_bos": None}),
        (records.TokenizerSpec, {"name": "t", "store": "store", "train_on": TEXT, "vocab_size": 300}),
        (records.Sources, {"name": "c", "tokenizer": FROZEN, "identity": {"format": 1}, "folder": "store/corpora/c/1"}
         | {"files": [FILE, {**FILE, "kind": "stream", "stream": FROM_HUB}]}),
        (records.ShardMade, {"folder": None}),
        (records.Shard, {**MADE, "segments": [[0, 0, [9, 8]]], "columns": [COLUMN], "encoder": "gigatoken 0.10.0"}),
        (records.CorpusFacts, {**MADE, "documents": 9, "tokens": 90, "encoders": ["gigatoken 0.10.0"]}
         | {"datasets": [{**DATASET, "frequent": [[7, 60], [8, 30]], "by_file": [[0, 4], [1, 5]]}]}),
        (records.EvaluateSpec, {"command": "score {model} > {out}"}),
        (records.GenerateSpec, {"prompts": ["import", "def f("], "tokens": 32}),
        (records.Generations, {"export": "1", "iteration": 8, "image": ["sha256:1"]}
         | {"generations": [{"prompt": "import", "megatron": " os", "transformers": " re", "same": False}]}),
        (records.ReportSpec, {"title": None, "agreements": [AGREEMENT], "proofs": ["p"], "runs": ["a"], "invalid": []}
         | {"question": None, "published": None, "figures": [{"name": "mine"}], "values": {"a": {"training.seed": 1}}}
         | {"profiles": [], "evaluated": []}),
        (records.Checks, {"state": "FAIL", "counts": {"runs": {"PASS": 2}, "checks": {"FAIL": 1}}}
         | {"failed": [{"name": "b", "detail": "d", "anchor": "run-b"}]}
         | {"checks": [{"kind": "agreement", "name": "b", "state": "FAIL", "detail": "d", "run": "b", "step": None}]}),
        (records.Refusals, {"packages": "p", "runs": {"a": {"identity": "1", "reasons": ["r"], "image": None}}}),
        (records.NodeHealth, {"node": "n1", "number": 0, "ok": False, "problems": ["p"], "stage": "done"}
         | {"collective": {"reached": True, "missing": [1], "error": None}, "measured": {"tflops": [None, 1.0]}}),
        (records.Verification, {"corpus": "c", "digest": "1", "compared": 9, "decoded_exactly": 9}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_jobs_of_version_0_left_is_read_and_written_as_it_was(path, kind, written):
    write_json(path, {**written, "of the future": 1})
    assert plain(records.read(kind, path)) == json.loads(json.dumps({**written, "of the future": 1}))
    lacking = {key: value for key, value in written.items() if key != next(iter(written))}
    write_json(path, lacking)
    with pytest.raises(RecordError, match=f"it lacks {next(iter(written))}"):
        records.read(kind, path)


def test_lines_of_version_0_lose_nothing(old):
    store = RunStore(old.store)
    for path, kinds in ((store.ledger, LEDGER), (store.attempt(1).steps, STEPS)):
        lines = read_jsonl(path)
        read = [plain(event) for event in records.events(kinds, lines, path)]
        assert len(read) == len(lines) > 2
        assert all(event.items() >= line.items() for event, line in zip(read, lines, strict=True))
    (evaluated, *_) = [event for event in read_events(store) if isinstance(event, Evaluated)]
    assert evaluated.samples == (0, 8) and json.loads(records.line(evaluated))["samples"] == [0, 8]
