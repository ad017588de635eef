"""What only the image can check is said of the runs that use it, and of no others."""

import pytest
from facts_of import facts

from megaboa.preflight.image import RULES, missing, unchecked

PLAIN = {"layers": 4, "head_dim": 128, "precision": "bf16_mixed", "dispatcher": "alltoall"}
USED = {
    "low_precision_has_kernels": {"precision": "bf16_with_mxfp8_mixed"},
    "dispatcher_is_installed": {"dispatcher": "flex", "flex_backend": "deepep"},
    "graphs_can_be_captured": {"graphs": "transformer_engine"},
    "prediction_layers_are_there": {"mtp_layers": 1},
    "tensor_overlap_has_buffers": {"tp_comm_overlap": True},
    "attention_takes_the_head": {"head_dim": 80},
}


def test_every_rule_has_a_case():
    assert set(USED) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("name", USED)
def test_what_a_run_uses_is_named(name):
    (line,) = unchecked(facts(**{**PLAIN, **USED[name]}))
    assert "needs the image" in line and line.endswith(f"[{name}]")


def test_plain_runs_and_runs_on_the_cpu_leave_nothing_open():
    assert unchecked(facts(**PLAIN)) == unchecked(facts()) == []
    assert unchecked(facts(**{**PLAIN, "graphs": "local", "device": "cpu"})) == []


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (
            "RuntimeError: --use-precision-aware-optimizer requires FusedAdam from TransformerEngine, but not found.",
            "Adam",
        ),
        ("ValueError: fp4 requires Transformer Engine >= 2.7.0.dev0 for NVFP4BlockScaling", "Transformer Engine"),
        ("ImportError: MambaSSM is not installed.", "mamba-ssm"),
        ("AssertionError: num_layers=92 should be divisible by config.pipeline_model_parallel_size=8", None),
    ],
)
def test_an_objection_for_want_of_the_image_is_told_from_one_to_the_run(said, what):
    found = missing(said)
    assert (what in found) if what else found is None
