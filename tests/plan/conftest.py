"""A small experiment, and ways to plan variations of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megaboa.config import LoadedExperiment, load
from megaboa.plan import Plan, make_plan

SMALL = {
    "experiment": "small",
    "device": "cpu",
    "tokenizers": {"bpe": {"train_on": "text", "vocab_size": 512}},
    "corpora": {"text": {"source": "python-stdlib"}},
    "models": {
        "dense": {
            "tokenizer": "bpe",
            "config": {
                **{"model_type": "llama", "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
                "num_key_value_heads": 4,
            },
        }
    },
    "training": {"global_batch_size": 8, "seq_length": 128},
}


@pytest.fixture
def loaded_of(tmp_path: Path) -> Callable[..., LoadedExperiment]:
    """Load the small experiment with some keys (dotted) set in the file or on the command line."""

    def make(text: str = "", given: dict[str, object] | None = None) -> LoadedExperiment:
        base, more = tmp_path / "small.yaml", tmp_path / "more.yaml"
        base.write_text(yaml.safe_dump(SMALL))
        more.write_text(text or "{}")
        return load([base, more], given)

    return make


@pytest.fixture
def plan_of(loaded_of: Callable[..., LoadedExperiment]) -> Callable[..., Plan]:
    """Plan the small experiment with some keys (dotted) set in the file."""

    def make(text: str = "", **given: object) -> Plan:
        extra = given or {"training.train_iters": 10}
        return make_plan(loaded_of(text, {key.replace("__", "."): value for key, value in extra.items()}))

    return make
