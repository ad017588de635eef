"""Blends, splits, further validation sets and packed sequences, from the experiment file to the report."""

import json
import math
import os
import random
import re

import pandas as pd
import pytest
import sentencepiece
from clone import edit
from indexed_files import write_indexed

from megaboa.data import tokenizer
from megaboa.files import read_json

pytestmark = pytest.mark.slow

EXPERIMENT = """\
experiment: blends
device: cpu
tokenizers:
  bpe: {train_on: code, vocab_size: 384}
  gpt2: {vocab: old/gpt2-vocab.json, merges: old/gpt2-merges.txt}
  llama: {sentencepiece: old/llama.model}
corpora:
  old: {megatron: "0.3 old/a 0.7 old/b"}
  code: {source: python-stdlib, limit: 60}
  sums: {source: sums.jsonl}
  far: {source: far.jsonl, filter: short.py}
  pieces: {source: sums.jsonl, tokenizer: llama}
model: dense
models:
  dense:
    tokenizer: bpe
    init: pretrained
    config: &dense {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}
  other: {tokenizer: gpt2, config: *dense}
  llama: {tokenizer: llama, config: *dense}
training: {train_iters: 6, global_batch_size: 8, micro_batch_size: 2, seq_length: 64, precision: fp32, eval_interval: 3}
checkpoint: {save_interval: 3}
data: {max_epochs: 0.3}
sweep:
  runs:
    plain: {data.blend: BLEND, data.split: "80,10,10"}
    packed: {data.blend: BLEND, data.split: "80,10,10", data.reset_position_ids: true, data.reset_attention_mask: true,
      data.eod_mask_loss: true}
    sets: {data.blend: BLEND, data.split: "80,10,10", data.validation_sets: SETS}
    sets-dp2: {data.blend: BLEND, data.split: "80,10,10", data.validation_sets: SETS, resources.gpus_per_node: 2}
    own: {data.blend_per_split.train: code, data.blend_per_split.valid: sums}
    pieces: {model: llama, data.blend: pieces, data.split: "80,10,10"}
    given: {model: other, data.blend: old, data.split: "80,10,10"}
report:
  agreements: [{reference: sets, runs: [sets-dp2]}]
"""
GRAPH = """\
  runs:
    graph:
      data.blend: code
      data.split: "80,10,10"
      training.precision: bf16_mixed
      overrides.model.cuda_graph_impl: full_iteration
      overrides.model.cuda_graph_modules: []
      overrides.model.use_te_rng_tracker: true
      overrides.ddp.check_for_nan_in_grad: false
      overrides.rerun_state_machine.check_for_nan_in_loss: false
      overrides.dataset.defer_npy_index_mmap: true
"""
FILTER = """\
def keep(record):
    return int(record["text"].split()[0]) > 2 or "small numbers"
"""
BLEND = "{code: 3, sums: 1}"
SETS = "{sums: sums, far: {far: 1}}"
RUNS = ("plain", "packed", "sets", "sets-dp2", "own", "pieces", "given")


def index_files(workspace):
    """Every file of every index, and when it was written."""
    found = workspace.path.glob("store/indexes/*/*/cache/*")
    return {str(path): path.stat().st_mtime_ns for path in found}


def write_old(folder):
    """Tokens and a tokenizer as somebody has them who trained with Megatron before."""
    folder.mkdir()
    tokenizer.train([f"value {number} is {number * number}\n" for number in range(300)], 300, folder / "trained")
    model = read_json(folder / "trained" / "tokenizer.json")["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *lines]) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{number} + {number + 1} and so on" for number in range(300)]),
        model_prefix=str(folder / "llama"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    chance = random.Random(5)
    for name in ("a", "b"):
        documents = [chance.choices(range(300), k=chance.randint(1, 200)) for _ in range(60)]
        write_indexed(folder / name, documents)


@pytest.fixture(scope="module")
def done(workspace):
    """The data are made first; then all the rest."""
    for name, sign in (("sums", "+"), ("far", "minus")):
        texts = [f"{number} {sign} {number + 1} and so on\n" * 3 for number in range(80)]
        (workspace.path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (workspace.path / "short.py").write_text(FILTER)
    write_old(workspace.path / "old")
    config = workspace.path / "blends.yaml"
    config.write_text(EXPERIMENT.replace("BLEND", BLEND).replace("SETS", SETS))
    said = workspace.snakemake("data", "--configfile", config)
    before = index_files(workspace)
    workspace.snakemake("--configfile", config)
    return workspace, config, said, before


def index_of(workspace, run):
    return workspace.json(
        "blends", "data", "indexes", workspace.json("blends", "runs", run, "launch.json")["index"] + ".json"
    )


def test_runs_that_draw_the_same_samples_share_an_index(done):
    workspace, *_ = done
    names = {run: workspace.json("blends", "runs", run, "launch.json")["index"] for run in RUNS}
    assert names["plain"] == names["packed"] and names["sets"] == names["sets-dp2"]
    assert len(set(names.values())) == len(list(workspace.results("blends", "data", "indexes").glob("*.json"))) == 5


def test_training_builds_no_index(done):
    workspace, _, _, before = done
    assert len(before) > 20
    assert index_files(workspace) == before
    assert not list(workspace.path.glob("store/runs/**/index-cache"))


def test_the_index_says_how_often_each_corpus_is_read(done):
    workspace, _, said, _ = done
    index = index_of(workspace, "sets")
    assert index["samples"].keys() == {"train", "valid", "test", "valid/sums", "valid/far"}
    rows = {row["name"]: row for row in index["corpora"]}
    assert rows["code"]["weight"] == 0.75
    assert sum(row["tokens_asked"] for row in rows.values()) == 6 * 8 * 64
    for name, row in rows.items():
        there = workspace.json("blends", "data", f"{name}.json")["tokens"]
        assert 0 < row["tokens"] < there
        assert row["epochs"] == row["tokens_asked"] / row["tokens"]
    epochs, evaluation = index["warnings"]
    assert "corpus 'sums' is read" in epochs and "data.max_epochs is 0.3" in epochs
    assert "data.validation_sets.sums: corpus 'sums' has " in evaluation and "reads 512 " in evaluation
    assert all(f"warning: {warning}" in said for warning in index["warnings"])


def test_further_validation_sets_have_losses_of_their_own(done):
    workspace, *_ = done
    for run in ("sets", "sets-dp2"):
        summary = workspace.json("blends", "runs", run, "metrics", "summary.json")
        assert [entry["step"] for entry in summary["validation"]] == [3, 6]
        for entry in summary["validation"]:
            assert entry["losses"].keys() == {"lm loss", "valid/sums", "valid/far"}
        steps = pd.read_parquet(workspace.results("blends", "runs", run, "metrics", "steps.parquet"))
        assert steps["valid/far"].notna().tolist() == [False, False, True, False, False, True]
        assert steps["valid/far"].iloc[-1] == summary["validation"][-1]["losses"]["valid/far"]


def test_further_validation_sets_do_not_change_training(done):
    workspace, *_ = done
    assert len(workspace.steps("blends", "plain")) == 6
    assert workspace.steps("blends", "sets") == workspace.steps("blends", "plain")


def test_every_option_changes_what_is_learnt(done):
    workspace, *_ = done
    curves = {run: workspace.steps("blends", run) for run in ("plain", "packed", "own")}
    assert all(math.isfinite(float.fromhex(loss)) for curve in curves.values() for _, loss, _ in curve)
    assert len({curve[-1] for curve in curves.values()}) == 3


def test_existing_tokens_are_trained_on_where_they_lie(done):
    workspace, _, _, _ = done
    corpus = workspace.json("blends", "data", "old.json")
    assert corpus["is_given"] and [part["weight"] for part in corpus["datasets"]] == [0.3, 0.7]
    assert not list(workspace.results("blends", "data").glob("old.bin"))
    assert len(workspace.steps("blends", "given")) == 6
    described = [path.read_text() for path in workspace.path.glob("store/indexes/*/*/cache/*BlendedDataset-train*.txt")]
    (given,) = [text for text in described if "old/a" in text]
    assert [part["dataset_path"] for part in json.loads(given)["datasets"]] == ["old/a", "old/b"]
    assert json.loads(given)["weights"] == [0.3, 0.7]
    assert workspace.json("blends", "models", "other", "source.json")["vocab_size"] == 300


def test_existing_tokens_that_change_are_noticed_and_the_same_ones_are_trained_on_no_more(done):
    workspace, config, *_ = done
    path = workspace.path / "old" / "a.bin"
    before = path.read_bytes()
    path.write_bytes(before)
    assert "train" not in workspace.planned("--configfile", config)
    path.write_bytes(before[2:] + before[:2])
    planned = workspace.planned("--configfile", config)
    assert (planned["list_sources"], planned["merge_corpus"], planned["train"]) == (1, 1, 1)
    path.write_bytes(before)


def test_texts_that_an_older_file_replaces_are_noticed(done):
    workspace, config, *_ = done
    path = workspace.path / "sums.jsonl"
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(before[: before.rindex(b"\n", 0, -1) + 1])
    os.utime(path, (1e9, 1e9))
    said = "sums.jsonl has another size than when it was read, though it isn't newer: corpus sums"
    shown = workspace.snakemake("-n", "--configfile", config)
    assert f"{said} would be made again" in shown and re.search(r"^list_sources +2  sums\.json changed", shown, re.M)
    manifests = [f"results/blends/data/{name}/sources.json" for name in ("sums", "pieces")]
    assert f"{said} is made again" in workspace.snakemake(*manifests, "--configfile", config)
    listed = read_json(workspace.path / manifests[0])["files"]
    assert [file["size"] for file in listed] == [path.stat().st_size]
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    workspace.snakemake(*manifests, "--configfile", config)
    assert workspace.planned("--configfile", config) == {}


def test_existing_tokens_beyond_the_models_vocabulary_make_no_index(done):
    workspace, config, *_ = done
    write_indexed(workspace.path / "old" / "wide", [[5, 399, 7]] * 60)
    wide = workspace.path / "wide.yaml"
    text = re.sub(r"(?ms)^sweep:.*", "data: {blend: old, split: '80,10,10'}\nmodel: other\n", config.read_text())
    text = text.replace("experiment: blends", "experiment: wide").replace("0.3 old/a 0.7 old/b", "old/wide")
    wide.write_text(text.replace("\ndata: {max_epochs: 0.3}", "").replace("\nmodel: dense\n", "\n"))
    said = workspace.snakemake("data", "--configfile", wide, code=1)
    assert (
        "corpora.old.megatron: old/wide.bin holds token 399, and its tokenizer has 300 tokens: set corpora.old" in said
    )
    assert not workspace.results("wide", "data", "old.json").exists()


def test_the_report_shows_the_blend_and_every_validation_loss(done):
    workspace, *_ = done
    assert workspace.json("blends", "report", "checks.json")["state"] == "PASS"
    page = workspace.results("blends", "report", "index.html").read_text()
    assert "far" in page and "epochs" in page


def test_what_a_filter_of_ones_own_dropped_is_said_and_another_version_of_it_trains_again(done):
    workspace, config, said, _ = done
    dropped = workspace.json("blends", "data", "far.json")["filtered"]
    assert (dropped["records"], dropped["reasons"]) == (3, {"small numbers": 3})
    assert "small numbers: 3" in said
    assert "3 by the filter: small numbers" in workspace.results("blends", "report", "index.html").read_text()
    edited = workspace.path / "short.py"
    edited.write_text(FILTER + "# another version\n")
    planned = workspace.planned("--configfile", config)
    assert (planned["list_sources"], planned["tokenize"], planned["train"]) == (1, 1, 2)
    edited.write_text(FILTER)


def test_an_index_that_is_made_again_trains_nothing_again(done):
    workspace, config, _, before = done
    manifest = next(workspace.results("blends", "data", "indexes").glob("*.json"))
    manifest.write_text(manifest.read_text() + "\n")
    assert workspace.planned("--configfile", config) == {"report": 1}
    edit(config, "max_epochs: 0.3", "max_epochs: 3")
    assert "train" not in workspace.planned("--configfile", config)
    workspace.snakemake("data", "--configfile", config)
    assert not [text for text in index_of(workspace, "sets")["warnings"] if "max_epochs" in text]
    assert index_files(workspace) == before


def test_an_index_needs_no_gpu_for_a_run_that_does(done):
    """Bridge refuses its graph, unless checks are off that change nothing; files that are opened later are written."""
    workspace, config, *_ = done
    text = config.read_text().replace("experiment: blends", "experiment: graphs").replace("device: cpu", "device: cuda")
    graphs = config.with_name("graphs.yaml")
    graphs.write_text(text[: text.index("  runs:")] + GRAPH)
    workspace.snakemake("data", "--configfile", graphs)
    (index,) = workspace.results("graphs", "data", "indexes").glob("*.json")
    made = read_json(index)
    assert made["samples"]["train"] >= 6 * 8
    assert list((workspace.path / made["cache"]).glob("*.npy"))


def test_a_corpus_that_was_cut_off_ends_the_run_before_it_starts(done):
    workspace, config, *_ = done
    (dataset,) = workspace.json("blends", "data", "far.json")["datasets"]
    path = workspace.path / f"{dataset['prefix']}.bin"
    path.write_bytes(path.read_bytes()[:-2])
    edit(config, "train_iters: 6", "train_iters: 7")
    output = workspace.snakemake("--configfile", config, code=1)
    assert "run sets: corpora.far:" in output and "and its manifest says" in output
