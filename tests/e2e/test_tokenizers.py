"""Two tokenizers compared on texts of two languages: the report's bits per byte are those that transformers gives."""

import json
import math
import random
import textwrap

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

LENGTH = 32
RUNS = ("small", "large")
TEXTS = {
    "web": "Der Vogel sitzt im Baum und singt {} Lieder über die Größe des Gartens. ",
    "far": "Птица сидит на дереве и поёт {} песен о величине сада. ",
}
EXPERIMENT = """\
    experiment: tokenizers
    device: cpu
    tokenizers:
      small: {train_on: web-small, vocab_size: 300}
      large: {train_on: web-large, vocab_size: 900}
    corpora:
      web-small: {source: web.jsonl, tokenizer: small}
      web-large: {source: web.jsonl, tokenizer: large}
      far-small: {source: far.jsonl, tokenizer: small}
      far-large: {source: far.jsonl, tokenizer: large}
    models:
      small: &model
        tokenizer: small
        config: {model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
          num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}
      large: {<<: *model, tokenizer: large}
    training: {train_iters: 20, global_batch_size: 8, micro_batch_size: 8, seq_length: 32, eval_iters: 24}
    checkpoint: {save_interval: 20}
    sweep:
      runs:
        small: {model: small, data.blend: web-small, data.validation_sets: {far: far-small}}
        large: {model: large, data.blend: web-large, data.validation_sets: {far: far-large}}
    export: {runs: all}
"""


def bits_per_byte(model, path):
    """Over all documents, one after the other with end-of-text tokens, as Megatron packs them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [one for text in texts for one in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    pieces = torch.tensor(ids[: (len(ids) - 1) // LENGTH * LENGTH + 1])
    inputs, labels = pieces[:-1].view(-1, LENGTH), pieces[1:].view(-1, LENGTH)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    return loss / math.log(2) * len(ids) / sum(len(text.encode()) for text in texts)


def test_bits_per_byte_are_those_of_the_texts(workspace):
    chance = random.Random(1)
    for name, text in TEXTS.items():
        several = [
            "".join(text.format(chance.randint(1, 999)) for _ in range(chance.randint(1, 9))) for _ in range(150)
        ]
        lines = "".join(json.dumps({"text": one}) + "\n" for one in several)
        (workspace.path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    config = workspace.path / "tokenizers.yaml"
    config.write_text(textwrap.dedent(EXPERIMENT))
    workspace.snakemake("--configfile", config)
    table = workspace.results("tokenizers", "report", "tables", "bits_per_byte.tsv")
    found = pd.read_csv(table, sep="\t", index_col="run")
    assert list(found.columns) == ["main", "far"] and list(found.index) == list(RUNS)
    for run in RUNS:
        export = workspace.results("tokenizers", "runs", run, "export")
        whole = bits_per_byte(export, workspace.path / "far.jsonl")
        # The run's samples are a part of the texts, and in bf16. Differences of up to 0.2% were seen.
        assert found["far"][run] == pytest.approx(whole, rel=0.01)
