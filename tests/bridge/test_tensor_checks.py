"""What counts as the same tensor, and models from which something is missing that their config promises."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from megaboa.bridge.tensor_checks import complete, round_trip, same_bits, trained, trained_from_scratch
from megaboa.bridge.weights import Tensors, count

NAMES = ("a", "b", "c")
DENSE = {"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4), "model.norm.weight": (4,)}


def weights(**changes):
    values = {name: torch.full((2, 3), float(number)) for number, name in enumerate(NAMES)} | changes
    return {name: value for name, value in values.items() if value is not None}


@pytest.fixture
def folder(tmp_path):
    """A model of two files."""
    whole = weights()
    save_file({"a": whole["a"], "b": whole["b"]}, tmp_path / "model-1.safetensors")
    save_file({"c": whole["c"]}, tmp_path / "model-2.safetensors")
    return tmp_path


def outcome(folder, returned):
    with Tensors(folder) as originals:
        return {check.name: check for check in round_trip(originals, returned.items())}


def test_tensors_are_found_in_all_files(folder):
    with Tensors(folder) as tensors:
        assert sorted(tensors) == list(NAMES)
        assert torch.equal(tensors["c"], weights()["c"])
        assert str(tensors.kind("c")) == "F32[2, 3]"
    assert count(folder) == 18


def test_the_same_tensors_pass(folder):
    checks = outcome(folder, weights())
    assert [check.state for check in checks.values()] == ["PASS", "PASS"]
    assert checks["round trip"].detail == "3 of 3 tensors are the same bit for bit"


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"b": None}, "FAIL", "missing: b"),
        ({"d": torch.zeros(1)}, "FAIL", "not in the model: d"),
        ({"b": torch.ones(3, 2)}, "FAIL", "changed: b (F32[3, 2], not F32[2, 3])"),
        ({"b": torch.ones(2, 3).bfloat16()}, "FAIL", "changed: b (BF16[2, 3], not F32[2, 3])"),
        ({"b": torch.ones(2, 3).nextafter(torch.tensor(2.0))}, "PASS", "3 of 3 tensors have"),
    ],
)
def test_any_difference_fails(folder, changes, tensors, said):
    checks = outcome(folder, weights(**changes))
    assert checks["tensors"].state == tensors
    assert said in checks["tensors"].detail
    assert checks["round trip"].state == "FAIL"


def test_bits_and_not_values_are_compared():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous())
    assert same_bits(torch.tensor(1.5).bfloat16(), torch.tensor(1.5).bfloat16())


def test_a_model_is_trained_when_a_tensor_has_changed(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_file(weights(), other / "model.safetensors")
    with Tensors(folder) as before, Tensors(other) as after:
        assert trained(before, after).state == "FAIL"
    save_file(weights(b=torch.zeros(2, 3)), other / "model.safetensors")
    with Tensors(folder) as before, Tensors(other) as after:
        found = trained(before, after)
    assert (found.state, found.detail) == ("PASS", "1 of 3 tensors differ from those of the source")


@pytest.mark.parametrize(
    ("dtype", "scale", "state"),
    [
        (torch.float32, [1.0, 1.0], "FAIL"),
        (torch.float32, [1.0, 1.0000001], "PASS"),
        (torch.bfloat16, [1.0, 0.99], "PASS"),
        (torch.bfloat16, [1.0, 0.9999], None),  # rounded to 1
    ],
)
def test_of_a_model_from_scratch_the_norms_show_that_it_was_trained(tmp_path, dtype, scale, state):
    tensors = {
        "model.layers.0.input_layernorm.weight": torch.tensor(scale, dtype=dtype),
        "model.norm.weight": torch.ones(2, dtype=dtype),
        "model.embed_tokens.weight": torch.randn(4, 2).to(dtype),  # at random, trained or not
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Tensors(tmp_path) as after:
        found, why = trained_from_scratch(after, dtype)
    assert (found.state if found else None) == state
    assert (why is None) == (state is not None)


def test_without_norms_nothing_is_said_of_the_training(tmp_path):
    save_file({"model.embed_tokens.weight": torch.randn(4, 2)}, tmp_path / "model.safetensors")
    with Tensors(tmp_path) as after:
        assert trained_from_scratch(after, torch.float32) == (None, "the model has no norms, whose start is known")


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


def test_a_mixture_of_experts_that_is_cut_to_its_dense_layers_has_none(tmp_path):
    config = {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "first_k_dense_replace": 2,
        "tie_word_embeddings": False,
    }
    assert "experts" not in checks(tmp_path, DENSE, num_hidden_layers=2, **config)
    (tmp_path / "sparse").mkdir()
    assert checks(tmp_path / "sparse", DENSE, num_hidden_layers=3, **config)["experts"][0] == "FAIL"


def test_a_hybrid_model_has_the_kinds_of_layers_that_its_config_names(tmp_path):
    """Nemotron-H's config has 8 experts in any case."""
    kinds = {"model_type": "nemotron_h", "tie_word_embeddings": False}
    assert "experts" not in checks(tmp_path, DENSE, layers_block_type=["mamba", "attention", "mlp"], **kinds)
    (tmp_path / "sparse").mkdir()
    found = checks(tmp_path / "sparse", DENSE, layers_block_type=["mamba", "moe"], **kinds)
    assert found["experts"][0] == "FAIL"
