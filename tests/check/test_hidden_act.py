"""Activations that Bridge's converters lose. A slow test compares the tables with Bridge: test_activation_functions."""

import json
from pathlib import Path

import pytest

from megaboa.check import hidden_act

CONFIGS = json.loads((Path(__file__).parents[1] / "fixtures" / "hf_configs.json").read_text())


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name]["model_type"] != "step3p5"])
def test_published_configs_lose_nothing(name):
    assert hidden_act.lost(CONFIGS[name]) is None


def test_a_message_names_key_value_and_remedy():
    said = hidden_act.lost({"model_type": "mistral", "hidden_act": "gelu"})
    assert str(said).startswith("hidden_act: 'gelu' is lost: Bridge's converter of mistral always has silu. Change it ")
    said = hidden_act.lost({"model_type": "gemma3", "text_config": {"hidden_activation": "gelu_new"}})
    assert str(said) == (
        "text_config.hidden_activation: Bridge's converters have no 'gelu_new': write gelu_pytorch_tanh, the same "
        "function"
    )
    said = hidden_act.lost({"model_type": "llama", "hidden_act": "mish"})
    assert str(said) == f"hidden_act: Bridge's converters have no 'mish': they have {', '.join(hidden_act.KNOWN)}"


def test_what_bridge_trains_as_named_is_not_lost():
    for config in ({}, {"hidden_act": None}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}):
        assert hidden_act.lost({"model_type": "llama", **config}) is None
    assert hidden_act.lost({"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}) is None
    assert hidden_act.lost({"model_type": "gpt_oss", "hidden_act": "gelu"}) is None  # nobody reads it
