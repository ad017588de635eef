"""Ranks that measure how fast they calculate while Bridge's own pretrain() trains them, one of them slowed for real."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_ranks import on_cpu

from megaboa.records import read_paces
from megaboa.run import stragglers
from megaboa.store_paths import AttemptFolder

pytestmark = pytest.mark.slow

SLOW, SAVES = 1, 4
STOP_AND_GO = Path(__file__).parents[2] / "stop_and_go.py"


@contextlib.contextmanager
def slowed(stands: float, runs: float) -> Iterator[None]:
    """This process is stopped again and again: it stands still for some seconds, and runs for some."""
    words = [sys.executable, str(STOP_AND_GO), *map(str, (os.getpid(), stands, runs)), "until-closed"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        yield
        process.communicate()


def _pretrain(folder: str, measures: bool) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step: what this rank knows of them."""
    import tiny_training
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge.cpu import refuse
    from megaboa.bridge.pace import PaceWriter
    from megaboa.bridge.process import save_in_foreground

    save_in_foreground()
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    cfg = tiny_training.configuration(folder, dropout, {"save_interval": 1})
    refuse(cfg)
    record = tiny_training.recorder()
    slow = measures and int(os.environ["RANK"]) == SLOW
    writers = [PaceWriter(AttemptFolder(Path(folder)))] if measures else []
    with slowed(0.03, 0.01) if slow else contextlib.nullcontext():
        pretrain(cfg, forward_step, callbacks=[record, *writers])
    return record.steps


def test_a_slow_rank_is_found_and_no_loss_changes(tmp_path):
    plain, measured = tmp_path / "plain", tmp_path / "measured"
    measured.mkdir()
    without = on_cpu(_pretrain, str(plain), False, world_size=2)[-1]
    assert on_cpu(_pretrain, str(measured), True, world_size=2)[-1] == without and len(without) == SAVES
    paces = read_paces(AttemptFolder(measured).paces)
    assert [pace.step for pace in paces] == [*range(1, SAVES + 1)] and all(len(pace.seconds) == 2 for pace in paces)
    (one,) = stragglers.find(paces, 1.5, 3)
    assert one.rank == SLOW and one.times > 1.5
