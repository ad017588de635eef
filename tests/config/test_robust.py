"""Whatever stands in a file, the answer is a plan or a ConfigError, never a traceback."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megaboa.config import ConfigError, load
from megaboa.config.keys import all_keys
from megaboa.plan import make_plan

GOOD = {
    "tokenizers": {"bpe": {"train_on": "text"}},
    "corpora": {"text": {"source": "python-stdlib"}},
    "models": {"m": {"tokenizer": "bpe", "config": {"model_type": "qwen3", "hidden_size": 64}}},
    "training": {"train_iters": 10},
    "sweep": {"grid": {"parallel.tp": [1]}, "runs": {"a": {"optimizer.lr": 0.1}}},
}
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from(
            [0.5, -1.0, 1e300, "", "x", "gbs", "gbs*", "-params", "m", "text", "bpe", "all", "*", "./x", "a.b"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["a", "m", "text", "parallel.tp", "model", "overrides.x.y", "x.y"]), inner, max_size=2
        ),
    ),
    max_leaves=4,
)
KEYS = [key.replace("models.<name>", "models.m").replace("<name>", "text").replace("[]", "") for key in all_keys()]
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS} - {""})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS + SECTIONS), VALUES, min_size=1, max_size=3))
def test_any_values(changes: dict[str, Any]) -> None:
    tree = copy.deepcopy(GOOD)
    for key, value in sorted(changes.items()):
        node: Any = tree
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node
        if isinstance(node, dict):
            node[last] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fuzz.yaml"
        file.write_text(yaml.safe_dump(tree))
        try:
            assert make_plan(load([file])).runs
        except ConfigError as error:
            assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abc: -[]{}&*!<\"'\n\t|>#,?%@`0.1~\x85", max_size=40))
def test_any_text(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fuzz.yaml"
        file.write_text(text)
        try:
            load([file])
        except ConfigError as error:
            assert "fuzz.yaml" in str(error)
