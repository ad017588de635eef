"""Checkpoints and samples of runs that must agree: what differs is found and named, what rounding does is not."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megaboa.bridge.checkpoint_tensors import counters
from megaboa.bridge.tensor_agreement import compare
from megaboa.files import write_text
from megaboa.paths import ExperimentFolder
from megaboa.records import AgreementSpec, RunSpec, TensorsSpec, TrainRecord, write
from megaboa.records.base import Tree
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

pytestmark = pytest.mark.slow

STOP, END = 6, 11
WEIGHT, MOMENT = "decoder.fc1.weight", "optimizer.state.exp_avg.decoder.fc1.weight"
ROUNDING = 1e-7
AGREEMENT = AgreementSpec(reference="whole", runs=("resumed",), tolerance=1e-5, twins=("twin",), tensors=True)


class Lab:
    """Runs with checkpoints as PyTorch writes them."""

    def __init__(self, path):
        self.path = path
        self.experiment = ExperimentFolder(path / "results" / "lab")
        generator = torch.Generator().manual_seed(1)
        self.state = {
            WEIGHT: torch.randn(32, 24, generator=generator),
            "embedding.word_embeddings.weight": torch.randn(40, 8, generator=generator),
            MOMENT: torch.randn(32, 24, generator=generator) * 1e-3,
            "optimizer.state.exp_avg_sq.decoder.fc1.weight": torch.rand(32, 24, generator=generator) * 1e-6,
        }

    def run(self, name, **asked):
        folder = self.experiment.run(name)
        write(folder.file("run"), RunSpec(**asked))
        facts = {"train_iters": END, "iteration": END, "world_size": 1}
        write(folder.train_manifest, TrainRecord(run=name, identity=name, store=str(self.path / name), **facts))

    def started(self, name, resumed_from):
        """Its ledger has a start from this step."""
        start = {"event": "start", "attempt": 1, "time": 0.0, "world_size": 1, "resumed_from": resumed_from}
        path = RunStore(self.path / name).ledger
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.write(json.dumps(start | {"host": "h", "pid": 1, "nodes": ["h"]}) + "\n")

    def save(self, name, step, state=None, optimizer_step=None, random=(1, 2)):
        store = RunStore(self.path / name)
        folder = checkpoints.folder(store.checkpoints, step)
        groups = [{"lr": 1e-3, "step": optimizer_step or step, "params": [0]}]
        objects: Tree = {
            "common_state/shard_0_1": [
                {"optimizer": {"param_groups": groups}, "opt_param_scheduler": {"num_steps": 8 * step}}
            ],
            "rng_state/shard_0_1": [{"random": random, "torch": torch.arange(3)}],
        }
        dcp.save(
            {**(state or self.state), **objects},
            storage_writer=dcp.FileSystemWriter(folder),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),  # as Megatron: an object stays one
            no_dist=True,
        )
        torch.save(
            {"step": torch.tensor(step), "consumed_train_samples": torch.tensor(8 * step)}, folder / "train_state.pt"
        )
        write_text(folder / checkpoints.LAST_WRITTEN, "")
        checkpoints.mark_complete(store.checkpoints)

    def read(self, name, samples, attempt=1, rank=0):
        path = RunStore(self.path / name).attempt(attempt).samples / f"{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'{{"step": {step}, "samples": ["{one}", "{one}b"]}}\n' for step, one in samples.items()]
        path.write_text("".join(lines))

    def checks(self, agreement=AGREEMENT):
        found = compare(TensorsSpec(agreements=(agreement,)), self.experiment)
        return {check.part: check for check in found.checks}

    def changed(self, name, change):
        return {**self.state, name: change(self.state[name].clone())}

    def rounded(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            name: value * (1 + ROUNDING * torch.randn(value.shape, generator=generator))
            for name, value in self.state.items()
        }


@pytest.fixture
def lab(tmp_path):
    """A run in one go, with a twin, and one that was stopped."""
    lab = Lab(tmp_path)
    for name in ("whole", "resumed"):
        lab.run(name)
        lab.save(name, STOP)
    lab.run("twin", training={"nudge": 1})
    lab.save("whole", END)
    lab.save("twin", END, lab.rounded(1))
    for name, step in (("whole", 0), ("resumed", 0), ("resumed", STOP)):
        lab.started(name, step)
    for name in ("whole", "resumed"):
        lab.read(name, {step: f"s{step}" for step in range(1, END + 1)})
    return lab


def test_a_reference_that_was_interrupted_itself_proves_nothing(lab):
    lab.save("resumed", END)
    lab.started("whole", STOP)
    found = lab.checks()
    assert {check.state for check in found.values()} == {"NOT_RUN"}
    assert "whole was interrupted itself, and resumed after step 6" in found["weights"].detail
    assert f"{lab.experiment.run('whole').path}, and call again" in found["weights"].detail


def test_a_run_that_was_never_stopped_proves_nothing(lab):
    lab.save("resumed", END)
    RunStore(lab.path / "resumed").ledger.unlink()
    lab.started("resumed", 0)
    assert {check.state for check in lab.checks().values()} == {"NOT_RUN"}


def one_ulp(tensor):
    tensor[3, 5] = torch.nextafter(tensor[3, 5], torch.tensor(torch.inf))
    return tensor


def test_a_resumption_that_changes_nothing_is_equal(lab):
    lab.save("resumed", END)
    found = lab.checks()
    assert list(found) == ["weights", "optimizer", "counters", "random numbers", "data order"]
    assert {check.state for check in found.values()} == {"PASS"}
    assert {check.verdict for check in found.values()} == {"equal"}
    assert found["weights"].detail == "equal to the last bit: 2 tensors, at step 11"
    assert found["data order"].detail == "the same 22 samples in 11 steps, 1 to 11"


def test_one_number_of_a_moment_that_is_one_ulp_off_is_named(lab):
    lab.save("resumed", END, lab.changed(MOMENT, one_ulp))
    found = lab.checks()
    assert [part for part, check in found.items() if check.state == "FAIL"] == ["optimizer"]
    assert "1 of 2 tensors differ at step 11, and none did at step 6" in found["optimizer"].detail
    assert "exp_avg of decoder.fc1.weight by " in found["optimizer"].detail
    assert "in 1 of 768 numbers" in found["optimizer"].detail


def test_another_layout_may_differ_by_rounding(lab):
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, lab.rounded(2))
    found = lab.checks()
    assert found["weights"].verdict == found["optimizer"].verdict == "within rounding"
    assert found["optimizer"].state == "PASS"
    assert 0 < found["optimizer"].difference < found["optimizer"].limit < 1e-5


@pytest.mark.parametrize("name", [WEIGHT, MOMENT, "embedding.word_embeddings.weight"])
def test_one_percent_in_another_layout_is_found_and_named(lab, name):
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, {**lab.rounded(2), name: lab.state[name] * 1.01})
    found = lab.checks()["optimizer" if name == MOMENT else "weights"]
    assert (found.state, found.verdict) == ("FAIL", "different")
    assert "1 of 2 tensors differ by more than 20 times the twins" in found.detail
    assert name.rpartition("exp_avg.")[2] in found.detail
    assert "by 1.0e-02 of its norm" in found.detail


def test_a_swapped_row_in_another_layout_is_found(lab):
    lab.run("resumed", world_size=2)
    swapped = lab.changed(WEIGHT, lambda tensor: tensor[[1, 0, *range(2, 32)]])
    lab.save("resumed", END, swapped)
    assert lab.checks()["weights"].state == "FAIL"


def test_an_optimizer_that_silently_restarted_fails(lab):
    """The weights may look the same: Adam's state and its count of steps don't."""
    fresh = {name: value * 0.4 if name.startswith("optimizer.") else value for name, value in lab.state.items()}
    lab.save("resumed", END, fresh, optimizer_step=END - STOP)
    found = lab.checks()
    assert found["weights"].state == "PASS"
    assert found["optimizer"].state == found["counters"].state == "FAIL"
    assert found["counters"].detail == "different: optimizer.step is 5, and 11 in whole"


def test_groups_of_parameters_of_another_layout_are_counted_alike():
    """With experts on several ranks there are two optimizers."""
    group = {"lr": 1e-3, "step": 11, "is_expert_parallel": False, "params": [0, 1]}
    apart = {**group, "is_expert_parallel": True, "params": [0]}
    one, two = {"optimizer": {"param_groups": [group]}}, {0: {"optimizer": {"param_groups": [group]}}}
    two[1] = {"optimizer": {"param_groups": [apart]}}
    assert counters([{"optimizer": one}], {}) == counters([{"optimizer": two}], {})
    late = {"optimizer": {"param_groups": [{**apart, "step": 5}]}}
    assert counters([{"optimizer": {**two, 1: late}}], {})["optimizer.step"] == "11 and 5"


def test_random_numbers_that_started_over_fail(lab):
    lab.save("resumed", END, random=(1, 3))
    found = lab.checks()
    assert [part for part, check in found.items() if check.state == "FAIL"] == ["random numbers"]


def test_where_two_identical_runs_differ_twins_are_the_limit(lab):
    lab.save("resumed", STOP + 1)  # later than the stop: other checkpoints aren't mistaken for it
    lab.path.joinpath("resumed", "checkpoints", "iter_0000006").rename(lab.path / "away")
    lab.save("resumed", STOP, lab.rounded(3))
    lab.save("resumed", END, lab.rounded(4))
    found = lab.checks()["optimizer"]
    assert (found.state, found.verdict) == ("PASS", "within rounding")
    assert "two identical runs differ here too, at step 6 by up to 1." in found.detail


def test_noise_hides_no_moment_that_is_wrong(lab):
    lab.path.joinpath("resumed", "checkpoints", "iter_0000006").rename(lab.path / "away")
    lab.save("resumed", STOP, lab.rounded(3))
    lab.save("resumed", END, {**lab.rounded(4), MOMENT: lab.state[MOMENT] * 1.01})
    assert lab.checks()["optimizer"].state == "FAIL"


def test_without_a_twin_a_difference_is_not_judged(lab):
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, lab.rounded(2))
    found = lab.checks(replace(AGREEMENT, twins=()))["weights"]
    assert (found.state, found.verdict) == ("NOT_RUN", None)
    assert "2 of 2 tensors differ, and without a twin it can't be told from rounding" in found.detail


def test_a_tensor_that_twins_know_nothing_of_is_said(lab):
    """A moment that is zero but for rounding: a twin's has nothing in common with it."""
    name = "optimizer.state.exp_avg_sq.decoder.fc1.weight"
    lab.path.joinpath("twin", "checkpoints", "iter_0000011").rename(lab.path / "away")
    lab.save("twin", END, {**lab.rounded(1), name: lab.state[name].flip(0)})
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, {**lab.rounded(2), name: lab.state[name] * 2})
    found = lab.checks()["optimizer"]
    assert found.state == "PASS"
    assert "of 1 tensors nothing can be told" in found.detail
    assert "exp_avg_sq of decoder.fc1.weight" in found.detail


def test_a_tensor_that_is_gone_fails(lab):
    lab.save("resumed", END, {name: value for name, value in lab.state.items() if name != MOMENT})
    found = lab.checks()["optimizer"]
    assert found.state == "FAIL"
    assert MOMENT in found.detail


@pytest.mark.parametrize("both", [True, False])
def test_shards_of_another_layout_are_not_compared(lab, both):
    """The weights are."""
    shards = {name: value for name, value in lab.state.items() if not name.startswith("optimizer.")}
    shards["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"] = torch.ones(768)
    if both:
        lab.path.joinpath("whole", "checkpoints", "iter_0000011").rename(lab.path / "away")
        lab.save("whole", END, {name: value[:384] if value.dim() == 1 else value for name, value in shards.items()})
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, shards)
    found = lab.checks()
    assert found["weights"].verdict == "equal"
    assert found["optimizer"].state == "NOT_RUN" and "checkpoint.reshardable" in found["optimizer"].detail


def test_a_twin_that_was_saved_otherwise_sets_no_limit(lab):
    shards = {name: value for name, value in lab.rounded(1).items() if not name.startswith("optimizer.")}
    shards["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"] = torch.ones(768)
    lab.path.joinpath("twin", "checkpoints", "iter_0000011").rename(lab.path / "away")
    lab.save("twin", END, shards)
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, lab.rounded(2))
    found = lab.checks()
    assert found["weights"].verdict == "within rounding"
    assert found["optimizer"].state == "NOT_RUN" and "without a twin" in found["optimizer"].detail


def test_rows_that_pad_a_vocabulary_are_not_compared(lab):
    name = "embedding.word_embeddings.weight"
    lab.run("resumed", world_size=2)
    lab.save("resumed", END, lab.changed(name, lambda tensor: torch.cat([tensor, torch.ones(8, 8)])))
    assert lab.checks()["weights"].verdict == "equal"


def test_checkpoints_of_different_steps_are_not_compared(lab):
    lab.path.joinpath("resumed", "checkpoints", "iter_0000006").rename(lab.path / "away")
    found = lab.checks()
    assert {found[part].state for part in ("weights", "optimizer", "counters")} == {"NOT_RUN"}
    assert found["data order"].state == "PASS"


def test_data_order_that_is_off_by_one_is_found(lab):
    lab.save("resumed", END)
    lab.read("resumed", {step: f"s{step}" if step <= STOP else f"s{step + 1}" for step in range(1, END + 1)})
    found = lab.checks()["data order"]
    assert (found.state, found.step) == ("FAIL", STOP + 1)
    assert found.detail == (
        "different: 5 of 11 steps read other samples, step 7 first: 2 of 2 there, which whole read at step 8"
    )


def test_a_step_counts_as_it_was_done_last_and_over_all_ranks(lab):
    lab.save("resumed", END)
    lab.read("resumed", {step: f"s{step}" for step in range(1, 9)}, attempt=1)
    lab.read("resumed", {7: "wrong"}, attempt=1, rank=1)
    lab.read("resumed", {step: f"s{step}" for step in range(7, END + 1)}, attempt=2)
    assert lab.checks()["data order"].state == "PASS"


def test_a_step_that_nobody_recorded_is_no_success(lab):
    lab.save("resumed", END)
    lab.read("resumed", {step: f"s{step}" for step in range(1, END + 1) if step != 8})
    assert lab.checks()["data order"].state == "FAIL"
    lab.read("resumed", {})
    assert lab.checks()["data order"].state == "NOT_RUN"
