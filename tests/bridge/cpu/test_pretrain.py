"""Bridge's own pretrain() on the CPU: layouts agree, and a resumed run continues bit for bit."""

import math
import multiprocessing

import pytest
from cpu_ranks import on_cpu

pytestmark = pytest.mark.slow


def _pretrain(folder: str, model: dict, checkpoint: dict, optimizer: dict) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step: what this rank knows of them."""
    import tiny_training
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge.cpu import refuse
    from megaboa.bridge.process import save_in_foreground

    save_in_foreground()
    cfg = tiny_training.configuration(folder, model, checkpoint)
    for name, value in optimizer.items():
        setattr(cfg.optimizer, name, value)
    if optimizer:
        cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = False
        cfg.ddp.overlap_param_gather = False
    refuse(cfg)
    record = tiny_training.recorder()
    pretrain(cfg, forward_step, callbacks=[record])
    assert not multiprocessing.active_children(), "a save starts no process"
    return record.steps


def _train(folder, world_size=1, model=None, optimizer=None, **checkpoint) -> dict[int, tuple[float, float]]:
    """What the last rank recorded."""
    return on_cpu(_pretrain, str(folder), model or {}, checkpoint, optimizer or {}, world_size=world_size)[-1]


def test_two_tensor_parallel_ranks_train_as_one_process_does(tmp_path):
    _train(tmp_path / "start")
    start = {"pretrained_checkpoint": str(tmp_path / "start" / "checkpoints")}
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    alone = _train(tmp_path / "one", **start)
    together = _train(tmp_path / "two", world_size=2, model=cut, **start)
    assert len(alone) == 4
    assert alone.keys() == together.keys()
    for step, values in alone.items():
        assert all(map(math.isfinite, values))
        assert together[step] == pytest.approx(values, abs=2e-6)
    assert len(set(alone.values())) == 4


def test_muon_on_two_tensor_parallel_ranks_is_that_of_one_if_they_gather_its_matrices(tmp_path):
    """Not by Bridge's default. e2e/test_muon.py has other layouts."""
    muon = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
    _train(tmp_path / "start", optimizer=muon)
    start = {"pretrained_checkpoint": str(tmp_path / "start" / "checkpoints")}
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    alone = _train(tmp_path / "one", optimizer=muon, **start)
    for mode, is_alike in (("duplicated", True), ("blockwise", False)):
        found = _train(tmp_path / mode, 2, cut, {**muon, "muon_tp_mode": mode}, **start)
        assert found[0] == pytest.approx(alone[0], abs=2e-6), "before the first step"
        assert all(found[step] == pytest.approx(values, abs=2e-6) for step, values in alone.items()) == is_alike, mode


def test_a_resumed_run_continues_bit_for_bit_dropout_included(tmp_path):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    whole = _train(tmp_path / "whole", model=dropout)
    rest = _train(
        tmp_path / "rest", model=dropout, load=str(tmp_path / "whole" / "checkpoints"), ckpt_step=2, save_interval=4
    )
    assert len(rest) == 2
    assert rest == {step: values for step, values in whole.items() if step in rest}
