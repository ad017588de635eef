"""What the report says of checkpoints that were compared, or were not."""

import pytest

from megaboa.paths import ExperimentFolder
from megaboa.records import (
    AgreementCheck,
    AgreementSpec,
    ComparedTensors,
    Flip,
    TensorCheck,
    TrainRecord,
    write,
)
from megaboa.report.checks import tensor_checks

AGREEMENT = AgreementSpec(reference="whole", runs=("tp2",), tolerance=1e-5, tensors=True)
FLIP = Flip(step=8, layer=2, choices=1, of=2048, margin=5e-7)


def compared(state="FAIL", limit=1e-5):
    check = TensorCheck(
        kind="tensors", name="tp2 has the weights of whole", state=state, detail="different: x", verdict="different",
        run="tp2", reference="whole", part="weights", limit=limit,
    )  # fmt: skip
    return ComparedTensors(identities={"whole": "1", "tp2": "2"}, checks=(check,))


def losses(state="PASS", flip=FLIP):
    return AgreementCheck(
        kind="agreement", name="", state=state, detail="", run="tp2", reference="whole", tolerance=1e-5, flip=flip
    )


@pytest.fixture
def results(tmp_path):
    facts = {"store": "", "train_iters": 1, "iteration": 1, "world_size": 1}
    for name, identity in (("whole", "1"), ("tp2", "2")):
        manifest = ExperimentFolder(tmp_path).run(name).train_manifest
        write(manifest, TrainRecord(run=name, identity=identity, **facts))
    return tmp_path


def test_no_check_where_no_agreement_asks_for_one(results):
    plain = AgreementSpec(reference="whole", runs=("tp2",), tolerance=1e-5)
    assert tensor_checks([plain], results, [], over=True) == []


def test_what_was_compared_is_shown(results):
    write(ExperimentFolder(results).tensors, compared())
    [check] = tensor_checks([AGREEMENT], results, [losses(flip=None)], over=False)
    assert (check.state, check.part) == ("FAIL", "weights")


def test_without_a_comparison_there_is_no_success(results):
    assert [one.state for one in tensor_checks([AGREEMENT], results, [], over=False)] == ["NOT_RUN"]
    [check] = tensor_checks([AGREEMENT], results, [], over=True)
    assert check.state == "FAIL"
    assert "tensors.log" in check.detail


def test_a_comparison_of_what_was_trained_before_does_not_count(results):
    write(ExperimentFolder(results).tensors, compared("PASS"))
    manifest = ExperimentFolder(results).run("tp2").train_manifest
    manifest.write_text(manifest.read_text().replace('"2"', '"3"'))
    assert [one.state for one in tensor_checks([AGREEMENT], results, [], over=False)] == ["NOT_RUN"]


def test_after_a_flip_of_experts_tensors_are_not_judged(results):
    write(ExperimentFolder(results).tensors, compared())
    [check] = tensor_checks([AGREEMENT], results, [losses()], over=False)
    assert (check.state, check.verdict) == ("NOT_RUN", None)
    assert check.detail.startswith("can't be told, as at step 8 1 of 2,048 choices fell on another expert in layer 2")


@pytest.mark.parametrize(("state", "limit"), [("PASS", None), ("FAIL", 1e-5)])
def test_a_flip_excuses_nothing_else(results, state, limit):
    """Not what had to be equal, nor what no tie explains."""
    write(ExperimentFolder(results).tensors, compared(limit=limit))
    assert [one.state for one in tensor_checks([AGREEMENT], results, [losses(state)], over=False)] == ["FAIL"]
