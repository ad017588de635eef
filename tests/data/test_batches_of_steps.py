"""Steps whose documents can't be named, and how ranks and parents count."""

import json
from pathlib import Path

import made
import numpy as np
import pytest
from called import called
from indexed_files import write_indexed

from megaboa.data import batches
from megaboa.doctor.examine import _read_in
from megaboa.errors import InputError
from megaboa.files import write_json
from megaboa.layout import Layout
from megaboa.paths import EarlierRun, RunFolder
from megaboa.records import DataIndex, Preflight, RunCheck, SourceFile, Sources, write
from megaboa.run import submitted
from megaboa.store_paths import FACTS


def run_of(root, name="r", index="abc", **given):
    folder = root / "results" / "e" / "runs" / name
    training = {"global_batch_size": 4, "micro_batch_size": 1, "train_iters": 9}
    run = {"data": {}, "model": {"name": "m", "init": "scratch", "recipe": None}, "training": training}
    write_json(folder / "run.json", {**run, "world_size": 2, **given})
    write_json(folder / "launch.json", {"index": index})
    return RunFolder(folder)


@pytest.fixture
def indexed(tmp_path):
    """One dataset of three documents, and an index of two-token samples, written as Megatron writes it."""
    write_indexed(tmp_path / "a", [[1, 2, 3], [4], [5] * 40])
    about = {"class": "GPTDataset", "dataset_path": f"{tmp_path}/a", "num_samples": 20}
    text = json.dumps(about, indent=4)
    cache = tmp_path / "cache"
    cache.mkdir()
    import hashlib

    stem = hashlib.md5(text.encode()).hexdigest() + "-GPTDataset-train"
    (cache / f"{stem}-description.txt").write_text(text)
    np.save(cache / f"{stem}-document_index.npy", np.array([0, 1, 2], np.int32))
    rows = [[0, 0], [0, 2], [2, 0], *([2, 2 * n] for n in range(1, 20))]
    np.save(cache / f"{stem}-sample_index.npy", np.array(rows, np.int32))
    np.save(cache / f"{stem}-shuffle_index.npy", np.array([1, 0, *range(2, 21)], np.uint32))
    index = DataIndex(name="abc", cache=str(cache), samples={}, corpora=(), max_epochs=4.0)
    write(tmp_path / "results" / "e" / "data" / "indexes" / "abc.json", index)
    return tmp_path


def pieces(batch):
    return [[(p.document, p.begin, p.tokens) for p in sample.pieces] for sample in batch.samples]


def test_samples_are_cut_at_the_ends_of_documents(indexed):
    batch = batches.of_step(run_of(indexed), 1)
    assert pieces(batch) == [[(0, 2, 1), (1, 0, 1)], [(0, 0, 2)], [(2, 0, 2)], [(2, 2, 2)]]
    assert [sample.copy for sample in batch.samples] == [0, 1, 0, 1]


def test_a_rank_reads_what_its_copy_of_the_model_reads(indexed):
    run = run_of(indexed, world_size=8, parallel={"tp": 2, "cp": 1, "pp": 2})
    for rank, copy in enumerate([0, 0, 1, 1, 0, 0, 1, 1]):
        batch = batches.of_step(run, 1, rank)
        assert [sample.number for sample in batch.samples] == [copy, 2 + copy]
    assert [Layout(8, cp=2, tp=2).copy_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_samples_of_the_parent_count(indexed):
    parent = {"experiment": "e", "run": "r", "iteration": 2, "load": {"optimizer": True, "rng": False}}
    run_of(indexed)
    child = run_of(indexed, "child", parent=parent, training={"global_batch_size": 5, "micro_batch_size": 1})
    assert batches.consumed(child, 4, 5) == 2 * 4 + 1 * 5
    with pytest.raises(InputError, match=r"--step 2: the run child begins after step 2 of e/r@2"):
        batches.consumed(child, 2, 5)


def test_steps_before_a_run_went_on_in_place_are_those_of_what_it_was(indexed):
    was = run_of(indexed)
    expected = pieces(batches.of_step(was, 2))
    load = {"optimizer": True, "rng": False}
    parent = {"experiment": "e", "run": "r", "iteration": 2, "load": load, "identity": "d" * 64}
    earlier = EarlierRun(was.path, identity="d" * 64)
    for name in ("run", "launch"):
        write_json(earlier.file(name), json.loads((was.path / f"{name}.json").read_text()))
    now = run_of(indexed, parent=parent, index="made for more steps", training={"global_batch_size": 5})
    batch = batches.of_step(now, 2)
    assert pieces(batch) == expected and batch.run == "e/r"
    with pytest.raises(InputError, match="the index of its data isn't made yet"):
        batches.of_step(now, 3)


@pytest.mark.parametrize(
    ("step", "rank", "given", "said"),
    [
        (0, None, {}, "--step 0: the run r has the steps 1 to 9"),
        (10, None, {}, "--step 10: the run r has the steps 1 to 9"),
        (1, 2, {}, "--rank 2: the run r has the ranks 0 to 1"),
        (1, None, {"index": None}, "r reads data that Bridge or its recipe makes up: there are no documents"),
        (1, None, {"index": "def"}, "r: the index of its data isn't made yet: call `snakemake data`"),
        (
            1,
            None,
            {"overrides": {"dataset.dataloader_type": "cyclic"}},
            "dataloader_type is cyclic, which takes no sam",
        ),
        (1, None, {"overrides": {"train.rampup_batch_size": [1, 1, 9]}}, "changes the batch from step to step"),
        (1, 0, {"overrides": {"dist.use_tp_pp_dp_mapping": True}}, "counts ranks in another order: leave it out"),
        (
            1,
            None,
            {"training": {}},
            "is the recipe's, and preflight finds it out: call `snakemake preflight`",
        ),
        (6, None, {}, "too short: call `snakemake data --forcerun index`"),
    ],
)
def test_what_is_wrong_is_one_sentence(indexed, step, rank, given, said):
    run = run_of(indexed, **given)
    with pytest.raises(InputError) as error:
        batches.of_step(run, step, rank)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_dataset_of_two_corpora_belongs_to_the_one_at_its_place_of_the_blend(indexed):
    run = run_of(indexed, data={"blend_per_split": {"train": {"all": 1, "extra": 3}, "valid": {"extra": 1}}})
    a, b = (made.dataset(prefix=f"{indexed}/{name}") for name in "ab")
    for name, datasets in {"all": (a, b), "extra": (a,)}.items():
        write(run.experiment_folder.corpus(name).manifest, made.corpus(*datasets, name=name, is_given=True))
    places = batches.Places(run, [a.prefix, b.prefix, a.prefix])
    found = [places.of(number, 0, 0, 1) for number in range(3)]
    assert [(piece.corpus, piece.dataset) for piece in found] == [
        ("all", a.prefix),
        ("all", b.prefix),
        ("extra", a.prefix),
    ]


@pytest.mark.parametrize(
    ("file", "separator", "where"),
    [
        ({"kind": "jsonl"}, None, ", byte 7"),
        ({"kind": "jsonl", "packed": "gz"}, None, ", record 7"),
        ({"kind": "text"}, "\n---\n", ", record 7"),  # begins and ends alike, so records are counted
        ({"kind": "text"}, "||", ", record 7"),
        ({"kind": "text"}, "<SEP>", ", byte 7"),
        ({"kind": "text"}, None, ""),
        ({"kind": "parquet"}, None, ", row 7"),
        ({"kind": "stream"}, None, ", row 7"),
    ],
)
def test_where_a_documents_text_is(indexed, file, separator, where):
    run = run_of(indexed, data={"blend": {"c": 1}})
    prefix = indexed / "store" / "c"
    prefix.parent.mkdir()
    Path(f"{prefix}.origins").write_bytes(np.array([7], "<i8").tobytes())
    facts = made.corpus(made.dataset(by_file=((0, 1),)))
    write(prefix.parent / FACTS, facts)
    folder = run.experiment_folder.corpus("c")
    write(folder.manifest, made.corpus(made.dataset(prefix=str(prefix)), name="c"))
    files = (SourceFile(path="c.data", **file),)
    write(
        folder.sources,
        Sources(name="c", files=files, tokenizer=None, identity={"separator": separator}, folder=str(prefix.parent)),
    )
    assert batches.Places(run, [str(prefix)]).of(0, 0, 0, 1).source == f"c.data{where}"


def test_an_index_that_is_gone_is_said(indexed):
    run = run_of(indexed)
    for path in (indexed / "cache").glob("*shuffle*"):
        path.unlink()
    with pytest.raises(InputError, match=r"shuffle_index.npy is gone: call `snakemake data --forcerun index`"):
        batches.of_step(run, 1)


def test_the_command_proposes_the_call_of_the_experiment(indexed):
    run = run_of(indexed)
    submitted.record(indexed / "results" / "e", [], [], "snakemake --configfile 'my own.yaml' --config training.seed=2")
    (indexed / "results" / "e" / "data" / "indexes" / "abc.json").unlink()
    done = called("documents", run.path, "--step", 1)
    again = "snakemake data --configfile 'my own.yaml' --config training.seed=2"
    assert (done.returncode, done.stderr) == (1, f"error: r: the index of its data isn't made yet: call `{again}`\n")


def test_a_recipes_sizes_are_those_of_preflight(indexed):
    run = run_of(indexed, training={}, model={"name": "m", "init": "scratch", "recipe": "r.py"})
    check = RunCheck(global_batch_size=2, micro_batch_size=1, train_iters=3, data_parallel_size=2)
    write(indexed / "results" / "e" / "preflight.json", Preflight(runs={"r": check}))
    assert [sample.number for sample in batches.of_step(run, 2).samples] == [2, 3]
    with pytest.raises(InputError, match=r"--rank 0: the recipe of r decides its layout"):
        batches.of_step(run, 1, 0)
    assert len(batches.of_step(run, 1, 0, Layout(2)).samples) == 1


def test_the_command_lists_and_says_json(indexed, monkeypatch):
    run_of(indexed)
    monkeypatch.chdir(indexed)
    done = called("documents", "e/r", "--step", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "step 2 of e/r: 4 samples of 4 to 7, 8 tokens"
    assert lines[1] == "  ?: 100.0% of the tokens, 1 document" and lines[2].split()[:3] == ["sample", "dp", "corpus"]
    assert lines[3].split() == ["4", "0", "?", "2", "4", "2", f"{indexed}/a"]
    found = json.loads(called("documents", "e/r", "--step", "2", "--rank", "1", "--json").stdout)
    assert [sample["number"] for sample in found["samples"]] == [5, 7]
    wrong = called("documents", "e/r", "--step", "12")
    assert wrong.returncode == 1 and "--step 12: the run r has the steps 1 to 9" in wrong.stderr


def test_the_doctor_names_shares_and_the_largest_document(indexed):
    first, call = _read_in(run_of(indexed), 2)
    assert first == "  step 2 read ? 100%, of 1 document; 100% of its tokens are from document 2 of ?"
    assert call == "  all of them: megaboa documents e/r --step 2"
    assert _read_in(run_of(indexed, index=None), 2) == []
