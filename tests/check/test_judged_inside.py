"""What preflight leaves open outside of an image, judged by the packages that the image has."""

import pytest
from facts_of import facts

from megaboa.check import image
from megaboa.check.in_image import NEEDS, installed, is_verdict, judge, lacks

NOTHING = {"transformer_engine": None, "deep_ep": None, "mamba_ssm": None}
FP8 = {"layers": 4, "head_dim": 128, "precision": "bf16_with_fp8_current_scaling_mixed"}


def test_every_rule_that_needs_the_image_names_its_package():
    assert set(NEEDS) == {rule.__name__ for rule in image.RULES}


def test_a_package_that_the_image_lacks_refuses_the_run():
    lacking, still_open = judge(facts(**FP8), NOTHING)
    assert lacking == [
        "training.precision: the image has no transformer_engine: bf16_with_fp8_current_scaling_mixed: "
        "Transformer Engine's kernels for it [low_precision_has_kernels]"
    ]
    assert still_open == []


def test_with_the_package_only_a_gpu_can_say_more():
    lacking, (line,) = judge(facts(**FP8), {**NOTHING, "transformer_engine": "2.9.0"})
    assert lacking == [] and "needs a GPU" in line and "transformer_engine 2.9.0 is in the image" in line


@pytest.mark.parametrize(
    ("backend", "package"), [("deepep", "deep_ep"), ("hybridep", "deep_ep"), ("ncclep", "transformer_engine")]
)
def test_a_dispatcher_lies_in_its_own_package(backend, package):
    run = facts(layers=4, head_dim=128, dispatcher="flex", flex_backend=backend)
    assert f"the image has no {package}" in judge(run, NOTHING)[0][0]
    assert judge(run, {**NOTHING, package: "1.2"})[0] == []


def test_which_heads_attention_takes_is_left_to_the_gpu():
    lacking, (line,) = judge(facts(layers=4, head_dim=80), NOTHING)
    assert lacking == [] and line.startswith("model.kv_channels: needs a GPU")


def test_nothing_is_open_for_a_run_on_the_cpu():
    assert judge(facts(**FP8, device="cpu"), NOTHING) == ([], [])


OLD = "ValueError: Only transformer-engine>=1.7.0 supports MoE FP8 training, but your version is 1.5."
MET = "AssertionError: TE version >= 2.7.0 is required for overlap_grad_reduce. Current TE version: 2.9.0"
HIDDEN = "RuntimeError: --use-precision-aware-optimizer requires FusedAdam from TransformerEngine, but not found."


ARCHITECTURE = "ValueError: Transformer Engine needs compute capability 10.0 and CUDA 13.1 for this"


@pytest.mark.parametrize(
    ("said", "version", "refused"),
    [
        (OLD, "1.5", True),
        (OLD, "1.5.0+abc", True),
        (MET, "2.9.0", False),
        (MET, "2.10.0", False),
        (HIDDEN, "2.9.0", False),
        (ARCHITECTURE, "2.9.0", False),
        (OLD, "of an unknown version", False),
        (HIDDEN, None, True),
    ],
)
def test_bridge_stopped_for_a_package_that_is_too_old_or_absent(said, version, refused):
    why = lacks(image.missing(said), said, {**NOTHING, "transformer_engine": version})
    assert (why is not None) == refused
    assert why is None or said in why


def test_mamba_is_a_package_of_its_own():
    said = "ImportError: MambaSSM is not installed."
    assert "no mamba_ssm" in lacks(image.missing(said), said, {**NOTHING, "transformer_engine": "2.9"})
    assert lacks(image.missing(said), said, {**NOTHING, "mamba_ssm": "2.2"}) is None


def test_a_hub_out_of_reach_is_no_verdict():
    assert not is_verdict(["OSError: We couldn't connect to 'https://huggingface.co' to load the files"])
    assert is_verdict(["ValueError: num_layers"])


def test_packages_are_found_by_their_metadata(tmp_path, monkeypatch):
    (tmp_path / "transformer_engine-1.5.dist-info").mkdir()
    (tmp_path / "transformer_engine-1.5.dist-info/METADATA").write_text("Name: transformer-engine\nVersion: 1.5\n")
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed() == {"transformer_engine": "1.5", "deep_ep": "of an unknown version", "mamba_ssm": None}
