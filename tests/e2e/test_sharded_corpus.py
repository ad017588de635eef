"""A corpus in shards through Snakemake: killed, called again, cut otherwise."""

import json
import os
import random
import signal
import time

import pytest
from clone import kill_group

pytestmark = pytest.mark.slow

EXPERIMENT = """\
experiment: shards
device: cpu
tokenizers:
  bpe: {train_on: text, vocab_size: 300}
corpora:
  text: {source: "texts/*.jsonl*", shards: SHARDS, tokenizer: bpe, deduplicate: true}
models:
  dense:
    tokenizer: bpe
    config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}
training: {train_iters: 1, seq_length: 64, precision: fp32}
"""


def configure(workspace, shards):
    path = workspace.path / "shards.yaml"
    path.write_text(EXPERIMENT.replace("SHARDS", str(shards)))
    return path


@pytest.fixture(scope="module")
def texts(workspace):
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(1, 9))) for _ in range(5000)]
    (workspace.path / "texts").mkdir()
    for number in range(3):
        lines = (json.dumps({"text": " ".join(chance.choices(words, k=200))}) + "\n" for _ in range(12_000))
        (workspace.path / "texts" / f"{number}.jsonl").write_text("".join(lines))
    return workspace


@pytest.fixture(scope="module")
def whole(texts):
    """The corpus made in one shard by nobody disturbed, and then forgotten."""
    texts.snakemake("results/shards/data/text.json", "--configfile", configure(texts, 1))
    manifest = texts.json("shards", "data", "text.json")
    prefix = texts.path / manifest["datasets"][0]["prefix"]
    content = {end: prefix.with_suffix(f".{end}").read_bytes() for end in ("bin", "idx", "origins")}
    for path in prefix.parent.iterdir():
        path.unlink()
    prefix.parent.rmdir()
    texts.results("shards", "data", "text.json").unlink()
    return prefix, content


def test_killed_while_shards_are_made_the_next_call_makes_the_same_corpus(texts, whole):
    prefix, content = whole
    config = configure(texts, 5)
    process = texts.start("data", "--configfile", config)
    shards = prefix.parent.with_name(f"{prefix.parent.name}.shards-of-5")
    deadline = time.monotonic() + 120
    while not (shards / "00001").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    kill_group(process)
    assert not prefix.parent.exists()
    kept = (shards / "00001" / "facts.json").stat().st_mtime_ns
    texts.snakemake("data", "--configfile", config)
    assert {end: prefix.with_suffix(f".{end}").read_bytes() for end in content} == content
    assert kept and not shards.exists()
    assert not list(texts.results("shards", "data", "text").glob("shard-*"))
    assert texts.json("shards", "data", "text", "verification.json")["compared"] > 100


def test_another_number_of_shards_makes_nothing_anew(texts, whole):
    prefix, content = whole
    written = prefix.with_suffix(".bin").stat().st_mtime_ns
    texts.snakemake("data", "--configfile", configure(texts, 2))
    assert prefix.with_suffix(".bin").stat().st_mtime_ns == written
    assert prefix.with_suffix(".bin").read_bytes() == content["bin"]
