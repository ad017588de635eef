"""Keys of Hugging Face configs: what the installed packages know is accepted, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaboa.config import config_keys
from megaboa.plan import families

ROOT = Path(__file__).parents[2]
CONFIGS = json.loads((ROOT / "tests" / "fixtures" / "hf_configs.json").read_text())


@pytest.mark.slow
def test_the_table_is_that_of_the_installed_packages():
    megaboa = ROOT / "workflow" / "scripts" / "megaboa"
    done = subprocess.run([sys.executable, megaboa, "write-config-keys", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_family_that_bridge_converts_is_in_the_table():
    assert set(config_keys.table()["families"]) == families.CONVERTIBLE


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs_are_accepted(name):
    assert list(config_keys.unknown(CONFIGS[name])) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/**/*.yaml")), ids=lambda path: path.name)
def test_shipped_experiments_are_accepted(path):
    for model in (yaml.safe_load(path.read_text()).get("models") or {}).values():
        assert list(config_keys.unknown(model.get("config") or {})) == []


def test_other_names_and_older_keys_are_accepted():
    older = {"torch_dtype": "bfloat16", "rope_theta": 1e6, "rope_scaling": {"type": "yarn"}, "architectures": ["X"]}
    assert list(config_keys.unknown({"model_type": "qwen3_moe", "num_experts": 8, **older})) == []
    assert list(config_keys.unknown({"model_type": "nemotron_h", "hybrid_override_pattern": "M-"})) == []


def test_of_a_family_that_is_not_known_nothing_is_said():
    assert list(config_keys.unknown({"model_type": "new", "anything": 1})) == []
    assert list(config_keys.unknown({"anything": 1})) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configs_have_the_types_of_the_classes(name):
    assert list(config_keys.mistyped(CONFIGS[name])) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "intermediate_size",
            "2 * hidden_size",
            "'2 * hidden_size' must be a whole number: a model's config takes no expressions",
        ),
        ("hidden_size", "512", "'512' must be a whole number, without quotes"),
        ("hidden_size", [512], "[512] must be a whole number"),
        ("hidden_size", True, "true must be a whole number"),
        ("hidden_size", 512.0, "512.0 must be a whole number"),
        ("hidden_size", None, "null must be a whole number"),
        ("rms_norm_eps", "1e-6", "'1e-6' must be a number, without quotes"),
        ("tie_word_embeddings", "yes", "'yes' must be true or false"),
        ("attention_bias", 1, "1 must be true or false"),
    ],
)
def test_a_value_of_another_type_is_named(key, value, said):
    assert list(config_keys.mistyped({"model_type": "qwen3", key: value})) == [((key,), said)]
    inside = {"model_type": "gemma3", "text_config": {key: value}}
    assert list(config_keys.mistyped(inside)) == [(("text_config", key), said)]


def test_null_leaves_a_key_to_a_class_that_takes_it():
    allowed = {"head_dim": None, "num_key_value_heads": None, "sliding_window": None, "rms_norm_eps": 1}
    assert list(config_keys.mistyped({"model_type": "qwen3", **allowed})) == []


def test_a_swept_value_is_named_with_its_own_key():
    raw = {"models": {"a": {"config": {"model_type": "qwen3"}}}}
    path = ("models", "a", "config", "rope_scaling")
    said = config_keys.wrong_value(path, {"rope_type": "llama3", "rope_theta": "1e4"}, raw)
    assert said == ["rope_theta: '1e4' must be a number, without quotes"]
    assert config_keys.wrong_value((*path, "rope_theta"), "1e4", raw) == ["'1e4' must be a number, without quotes"]
