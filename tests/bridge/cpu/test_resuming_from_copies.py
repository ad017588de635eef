"""Copies of the state on nodes, by Bridge's own pretrain() in two ranks, each on a node of its own.

The nodes are names: what a rank sees of its host is the folder of that name.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_training
from cpu_ranks import on_cpu

from megaboa.records import LocalBeginning, LocalPart, read, write
from megaboa.run import checkpoints
from megaboa.store_paths import RunStore

pytestmark = pytest.mark.slow

STEPS, SAVED, COPIED, ENDED = 10, 4, 6, 7


class Ended(Exception):
    """As a failure ends ranks."""


def _pretrain(
    store,
    attempt,
    copies=None,
    resume_from=0,
    hosts=("n0", "n1"),
    ends_after=None,
    pretrained=None,
    model=(),
    low=False,
    optimizer="adam",
):
    """What a rank recorded. `model`: further fields of it, `low`: in bf16 with copies of the weights in fp32."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import local_copies
    from megaboa.bridge.callbacks import CheckpointMarker
    from megaboa.bridge.process import save_in_foreground

    class End(Callback):
        def on_train_step_start(self, context):
            if context.state.train_state.step == ends_after:
                raise Ended

    save_in_foreground()
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    cfg = tiny_training.configuration(str(store), dropout | dict(model), {"save_interval": SAVED})
    if low:
        cfg.mixed_precision, cfg.optimizer.bf16, cfg.model.bf16 = "bf16_mixed", True, True
    cfg.train.train_iters, cfg.scheduler.lr_decay_iters = STEPS, STEPS
    cfg.optimizer.optimizer = optimizer
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = optimizer == "adam"
    cfg.ddp.overlap_param_gather = optimizer == "adam" and cfg.ddp.overlap_param_gather
    cfg.checkpoint.pretrained_checkpoint = pretrained
    if resume_from:
        cfg.checkpoint.load = str(checkpoints.folder(Path(cfg.checkpoint.save), resume_from))
    record = tiny_training.recorder()
    callbacks = [record, End()]
    if os.environ["RANK"] == "0":
        callbacks.append(CheckpointMarker(Path(cfg.checkpoint.save)))
    if copies:
        host, os.environ["LOCAL_RANK"] = hosts[int(os.environ["RANK"])], "0"
        local_copies.socket = SimpleNamespace(gethostname=lambda: host)
        wanted = {"local": {"every": 2, "folder": str(copies), "partner": True}}
        run = SimpleNamespace(launch=SimpleNamespace(checkpoint=wanted, nodes=2, gpus_per_node=1))
        target = RunStore(store).attempt(attempt)
        kept = local_copies.attach(cfg, checkpointing, run, RunStore(store), target, "abc", resume_from)
    try:
        pretrain(cfg, forward_step, callbacks=callbacks)
    except Ended:
        return record.steps
    if copies:
        kept.forget_at(STEPS)
    return record.steps


def parts(copies):
    """The files that count, by host and name."""
    found = copies.glob("megaboa-*/*/abc/*/iter_*/*.pt")
    return {f"{path.parents[1].name}/{path.parent.name}/{path.name}": path for path in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that nothing disturbs."""
    return on_cpu(_pretrain, tmp_path_factory.mktemp("whole"), 1, world_size=2)[-1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run that failed after step 7, with a checkpoint of step 4 and copies of step 6."""
    root = tmp_path_factory.mktemp("ended")
    (root / "copies").mkdir()
    on_cpu(_pretrain, root / "e" / "r" / "id", 1, root / "copies", 0, ("n0", "n1"), ENDED, world_size=2)
    return root


@pytest.fixture
def again(ended, whole, monkeypatch):
    """Resume it as it is then, in an attempt of its own; where it began, and that its losses are those of `whole`."""
    copies, store = ended / "copies", ended / "e" / "r" / "id"
    shutil.copytree(ended, ended.with_name("kept"))

    def resume(hosts=("n0", "n1"), newer_than=SAVED, pretrained=None):
        steps = on_cpu(_pretrain, store, 2, copies, newer_than, hosts, None, pretrained, world_size=2)[-1]
        began = RunStore(store).attempt(2).local_beginning
        assert len(whole) == STEPS
        first = read(LocalBeginning, began).iteration if began.exists() else SAVED
        assert steps == {step: values for step, values in whole.items() if step >= first}, "bit for bit"
        return first

    yield resume
    shutil.rmtree(ended)
    ended.with_name("kept").rename(ended)


def test_every_node_has_its_own_and_its_partners_newest_copies(ended):
    assert sorted(parts(ended / "copies")) == [
        f"{host}/iter_{COPIED:07d}/{rank}.pt" for host in ("n0", "n1") for rank in (0, 1)
    ]
    assert checkpoints.complete_iterations(ended / "e" / "r" / "id" / "checkpoints") == [SAVED]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (ended / "copies").glob("megaboa-*"))


def test_a_run_resumes_from_copies_that_are_newer_also_on_swapped_hosts(ended, again):
    assert again(("n1", "n0")) == COPIED
    assert not parts(ended / "copies"), "nothing is left when the run is over"


def test_a_wiped_node_gets_its_part_from_its_partner(ended, again):
    shutil.rmtree(next((ended / "copies").glob("*/*/abc/n1")))
    assert again() == COPIED


def test_a_changed_copy_is_replaced_by_the_partners_and_two_by_the_checkpoint(ended, again):
    files = parts(ended / "copies")
    for host in ("n0", "n1"):
        path = files[f"{host}/iter_{COPIED:07d}/0.pt"]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert again() == SAVED


def _of_another_attempt(part):
    record = part.with_suffix(".json")
    write(record, replace(read(LocalPart, record), attempt=9))


def _of_another_step(part):
    record = part.with_suffix(".json")
    write(record, replace(read(LocalPart, record), iteration=COPIED + 2))


def _cut(part):
    os.truncate(part, part.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [_of_another_attempt, _of_another_step, _cut])
def test_parts_that_do_not_fit_together_and_parts_that_are_cut_do_not_make_a_whole(ended, again, spoil):
    """The second: every record of the step is wrong in the same digit."""
    files = parts(ended / "copies")
    for host in ("n0", "n1"):
        for rank in (0, 1) if spoil is _of_another_step else (1,):
            spoil(files[f"{host}/iter_{COPIED:07d}/{rank}.pt"])
    assert again() == SAVED


def test_copies_come_before_the_weights_that_a_run_without_a_checkpoint_begins_with(ended, again):
    imported = shutil.copytree(ended / "e" / "r" / "id" / "checkpoints", ended / "imported")
    shutil.rmtree(ended / "e" / "r" / "id" / "checkpoints")
    assert again(newer_than=0, pretrained=str(imported)) == COPIED


TP2, PP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
EP2 = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "low", "optimizer"),
    [(TP2, False, "adam"), (TP2, True, "adam"), (PP2, False, "adam"), (EP2, False, "adam"), (EP2, True, "muon")],
    ids=["tp2", "tp2-bf16", "pp2", "ep2", "ep2-bf16-muon"],
)
def test_ranks_that_share_a_model_resume_from_their_copies(tmp_path, model, low, optimizer):
    store, copies = tmp_path / "e" / "r" / "id", tmp_path / "copies"
    copies.mkdir()
    shared = (None, model, low, optimizer)
    whole = on_cpu(_pretrain, tmp_path / "whole", 1, None, 0, (), None, *shared, world_size=2)[-1]
    on_cpu(_pretrain, store, 1, copies, 0, ("n0", "n1"), ENDED, *shared, world_size=2)
    shutil.rmtree(next(copies.glob("*/*/abc/n1")))  # it gets its part from its partner
    steps = on_cpu(_pretrain, store, 2, copies, SAVED, ("n0", "n1"), None, *shared, world_size=2)[-1]
    assert read(LocalBeginning, RunStore(store).attempt(2).local_beginning).iteration == COPIED
    assert steps == {step: values for step, values in whole.items() if step >= COPIED}, "bit for bit"
