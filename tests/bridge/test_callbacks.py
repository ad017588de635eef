"""megaboa.bridge.callbacks without Bridge: its callbacks need of it no more than three names."""

import importlib
import sys
import sysconfig
import time
import types
from pathlib import Path

import pytest

from megaboa.files import read_json, read_jsonl, write_json
from megaboa.run import checkpoints
from megaboa.run.lives import Signals
from megaboa.store_paths import AttemptFolder

STUBS = ("megatron", "megatron.bridge", "megatron.bridge.training", "megatron.core")
CALLBACKS, BATCHES = "megatron.bridge.training.callbacks", "megatron.core.num_microbatches_calculator"


@pytest.fixture
def callbacks(monkeypatch):
    for name in (*STUBS, CALLBACKS, BATCHES):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[CALLBACKS].Callback = sys.modules[CALLBACKS].CallbackContext = object
    sys.modules[BATCHES].get_current_running_global_batch_size = lambda: 4
    monkeypatch.delitem(sys.modules, "megaboa.bridge.callbacks", raising=False)
    yield importlib.import_module("megaboa.bridge.callbacks")
    del sys.modules["megaboa.bridge.callbacks"]


def context(step=7, **more):
    config = types.SimpleNamespace(
        train=types.SimpleNamespace(global_batch_size=8),
        dataset=types.SimpleNamespace(seq_length=64),
        validation=types.SimpleNamespace(eval_iters=2, eval_global_batch_size=None),
    )
    state = types.SimpleNamespace(train_state=types.SimpleNamespace(step=step, consumed_valid_samples=48), cfg=config)
    optimizer = types.SimpleNamespace(param_groups=[{"lr": 3e-4}])
    given = {"loss_dict": {"lm loss": 6.5}, "grad_norm": 1.5, "skipped_iter": 0, "total_loss_dict": {"lm loss": 6.0}}
    return types.SimpleNamespace(state=state, optimizer=optimizer, **given | more)


class Fenced(Exception):
    pass


@pytest.fixture
def fence(callbacks, tmp_path, monkeypatch):
    def gone(code):
        raise Fenced(code)

    monkeypatch.setattr(callbacks.os, "_exit", gone)
    monkeypatch.setattr(callbacks, "FENCE_SECONDS", -1.0)
    for number in (1, 2):
        write_json(tmp_path / f"{number:06d}.json", {})
    return callbacks.Fence(tmp_path, 2, tmp_path / "stop-now")


def test_who_holds_the_run_goes_on(fence):
    fence.on_train_step_end(context())
    fence.on_train_step_end(context())


def test_whose_run_was_given_to_somebody_else_ends_and_says_so(fence, tmp_path, capsys):
    write_json(tmp_path / "000003.json", {})
    with pytest.raises(Fenced, match="1"):
        fence.on_train_step_end(context())
    assert "claim 3 of this run is newer than ours, 2" in capsys.readouterr().err


def test_the_supervisors_word_is_taken_as_its_signal(fence, tmp_path):
    with Signals() as signals:
        fence.on_train_step_end(context())
        assert not signals.seen
        (tmp_path / "stop-now").touch()
        fence.on_train_step_end(context())
        assert signals.seen == ["SIGTERM"]


def test_nobody_looks_at_every_step(fence, callbacks, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "FENCE_SECONDS", 60.0)
    write_json(tmp_path / "000003.json", {})
    fence.on_train_step_end(context())


def test_events_are_what_the_supervisor_reads(callbacks, tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = callbacks.StepWriter(path)
    writer.on_train_start(context(step=0))
    writer.on_train_step_start(context())
    writer.on_train_step_end(context())
    writer.on_eval_start(context())
    time.sleep(0.05)
    writer.on_eval_end(context())
    time.sleep(0.05)
    writer.on_checkpoint_save(context())
    writer.on_train_end(context(step=8))
    writer.on_data_init_start(context(step=0))
    configured, begin, step, evaluated, save, end, built = read_jsonl(path)
    assert (configured["phase"], built["phase"]) == ("configured", "built")
    assert (begin["world_size"], begin["gpu"], begin["flops_per_token"]) == (1, None, None)
    assert (begin["event"], begin["step"], end["event"], end["step"]) == ("train_start", 0, "end", 8)
    assert (step["step"], step["loss"], step["lr"], step["tokens"], step["skipped"]) == (8, 6.5, 3e-4, 256, False)
    assert (evaluated["losses"], evaluated["samples"]) == ({"lm loss": 6.0}, [32, 48])
    assert 0.05 <= evaluated["seconds"] < 5
    assert 0.05 <= save["seconds"] < 5 and save["time"] >= evaluated["time"]


def test_phases_before_the_writer_and_those_that_setup_tells_of(callbacks, tmp_path):
    path, told = tmp_path / "steps.jsonl", []
    setup = types.SimpleNamespace(barrier_and_log=told.append)
    writer = callbacks.StepWriter(path, {"started": 5.0, "imported": 6.0})
    writer.follow(setup)
    for text in (*callbacks.SETUP, "after dataloaders are built"):
        setup.barrier_and_log(text)
    assert told[-1] == "after dataloaders are built" and len(told) == 3
    events = read_jsonl(path)
    assert [one["phase"] for one in events] == ["started", "imported", "configured", "connected", "model"]
    assert [one["time"] for one in events[:2]] == [5.0, 6.0]


def test_bridge_says_so_in_its_setup(callbacks):
    """Else the phases would be missing, and nobody would hear of it."""
    source = Path(sysconfig.get_path("purelib"), "megatron/bridge/training/setup.py").read_text()
    assert all(f'barrier_and_log("{text}")' in source for text in callbacks.SETUP)


def test_a_step_without_a_loss(callbacks, tmp_path):
    writer = callbacks.StepWriter(tmp_path / "steps.jsonl")
    writer.on_train_step_start(context())
    writer.on_train_step_end(context(loss_dict=None, grad_norm=None, skipped_iter=1))
    _, step = read_jsonl(tmp_path / "steps.jsonl")
    assert (step["loss"], step["grad_norm"], step["skipped"], step["losses"]) == (None, None, True, {})


def test_a_checkpoint_is_marked_when_the_save_is_over(callbacks, tmp_path):
    folder = checkpoints.folder(tmp_path, 10)
    folder.mkdir()
    marker = callbacks.CheckpointMarker(tmp_path)
    marker.on_checkpoint_save(context())
    assert checkpoints.latest(tmp_path) == 0
    (folder / checkpoints.LAST_WRITTEN).touch()
    marker.on_checkpoint_save(context())
    assert checkpoints.latest(tmp_path) == 10


def test_every_rank_leaves_a_record_of_its_end(callbacks, tmp_path):
    attempt = AttemptFolder(tmp_path)
    for rank in (0, 1):
        callbacks.EndRecord(attempt, rank).on_train_end(context(step=20))
    assert [read_json(attempt.end_record(rank)) for rank in (0, 1)] == [{"step": 20}] * 2
