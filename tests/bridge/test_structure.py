"""Models from which something is missing that their config promises."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from megaboa.bridge.structure import complete
from megaboa.bridge.tensors import Tensors

DENSE = {"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4), "model.norm.weight": (4,)}


def experts(numbers, layer=0):
    return {
        f"model.layers.{layer}.mlp.experts.{n}.{part}_proj.weight": (2, 4) for n in numbers for part in ("up", "gate")
    }


def checks(folder, shapes, **config):
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    with Tensors(folder) as weights:
        found = complete(weights, AutoConfig.for_model(**{"model_type": "llama", "vocab_size": 10, **config}))
    return {check.name: (check.state, check.detail) for check in found}


def test_a_whole_model(tmp_path):
    found = checks(tmp_path, DENSE, tie_word_embeddings=False)
    assert {name: state for name, (state, _) in found.items()} == {"vocabulary": "PASS", "head": "PASS"}


def test_padding_is_no_part_of_the_vocabulary(tmp_path):
    state, detail = checks(tmp_path, {**DENSE, "lm_head.weight": (16, 4)}, tie_word_embeddings=False)["vocabulary"]
    assert state == "FAIL"
    assert "lm_head.weight (16)" in detail


def test_a_head_of_its_own_must_be_there(tmp_path):
    shapes = {name: shape for name, shape in DENSE.items() if name != "lm_head.weight"}
    assert checks(tmp_path, shapes, tie_word_embeddings=False)["head"] == ("FAIL", "lm_head is missing")
    assert checks(tmp_path, shapes, tie_word_embeddings=True)["head"][0] == "PASS"


def test_a_tied_head_that_differs_is_not_tied(tmp_path):
    assert checks(tmp_path, DENSE, tie_word_embeddings=True)["head"][0] == "FAIL"


@pytest.mark.parametrize(
    ("shapes", "state", "said"),
    [
        (experts(range(4)), "PASS", "4 experts in each of 2 groups"),
        ({**experts(range(4)), **experts(range(4), layer=1)}, "PASS", "4 groups"),
        (experts((0, 1, 3)), "FAIL", "model.layers.0.mlp.experts.*.gate_proj.weight lacks [2]"),
        (experts(range(5)), "FAIL", "has 5"),
        (
            {**experts(range(4)), **experts(range(3), layer=1)},
            "FAIL",
            "model.layers.1.mlp.experts.*.gate_proj.weight lacks [3]",
        ),
        ({}, "FAIL", "0 groups"),
        ({"model.layers.0.mlp.experts.down_proj": (4, 2, 2)}, "PASS", "1 groups"),
        ({"model.layers.0.mlp.experts.down_proj": (3, 2, 2)}, "FAIL", "holds 3"),
    ],
)
def test_every_layer_has_all_experts(tmp_path, shapes, state, said):
    config = {"model_type": "qwen3_moe", "num_experts": 4, "tie_word_embeddings": False}
    found = checks(tmp_path, {**DENSE, **shapes}, **config)["experts"]
    assert found[0] == state
    assert said in found[1]
