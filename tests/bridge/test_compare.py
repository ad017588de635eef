"""What counts as the same tensor."""

import pytest
import torch
from safetensors.torch import save_file

from megaboa.bridge.compare import round_trip, same_bits, trained, trained_from_scratch
from megaboa.bridge.tensors import Tensors, count

NAMES = ("a", "b", "c")


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
