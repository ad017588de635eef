"""Bridge's own training loop, killed at random moments while it saves: what is resumed from is always whole."""

import random
import time
from pathlib import Path

import pytest
from cpu_ranks import running

from megaboa.run import checkpoints

pytestmark = pytest.mark.slow

KILLS = 20
KEEP_LAST, KEEP_EVERY = 2, 10


def _train(folder: str, load: str | None) -> None:
    """Save after every step, for as long as it is let."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge.callbacks import CheckpointMarker
    from megaboa.bridge.process import save_in_foreground

    save_in_foreground()
    cfg = _pretrain_common()
    sizes = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 8}
    cfg.model = GPTModelProvider(**sizes, vocab_size=512, make_vocab_size_divisible_by=128)
    cfg.mixed_precision = None
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 10_000, 1, 1
    cfg.scheduler.lr_warmup_iters = 0
    cfg.validation.eval_iters = 0
    cfg.dataset.seq_length, cfg.dataset.num_workers = 8, 0
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 511
    cfg.logger.tensorboard_dir = None
    cfg.dist.distributed_backend, cfg.dist.use_gloo_process_groups = "gloo", False
    cfg.checkpoint.save, cfg.checkpoint.load, cfg.checkpoint.save_interval = folder, load, 1
    cfg.checkpoint.dist_ckpt_optim_fully_reshardable = True
    pretrain(cfg, forward_step, callbacks=[CheckpointMarker(Path(folder))])


def unmarked(root):
    """The folder of a save that is not over."""
    return next((path for path in root.glob("iter_*") if not (path / checkpoints.MARKER).exists()), None)


def follow(root, until, chance, keep):
    """Do the supervisor's part until a checkpoint is there, then wait for a moment of the save after it."""
    began, seconds = None, 0.0
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        writes = unmarked(root)
        if writes and checkpoints.latest(root) >= until:
            return time.sleep(chance.uniform(0, 0.8 * seconds))
        if writes:
            began = began or time.monotonic()
        elif began:
            began, seconds = None, time.monotonic() - began
        keep()
        time.sleep(0.002)
    raise TimeoutError(f"no checkpoint {until}")


def test_a_kill_in_the_middle_of_a_save_costs_that_save_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    root, chance = tmp_path / "checkpoints", random.Random(11)
    reached = unfinished = 0
    for _ in range(KILLS):
        load = str(checkpoints.folder(root, reached)) if reached else None
        keep = checkpoints.keeper(root, verify=True, keep_last=KEEP_LAST, keep_every=KEEP_EVERY)
        until = reached + chance.randint(1, 2)
        with running(_train, str(root), load):
            follow(root, until, chance, keep)
        complete = checkpoints.complete_iterations(root)
        assert all(checkpoints.damage(root, iteration) is None for iteration in complete)
        assert complete[-1] >= until, "no good one was lost"
        assert set(range(KEEP_EVERY, complete[-1] + 1, KEEP_EVERY)) <= set(complete)
        reached = complete[-1]
        unfinished += bool(checkpoints.hide_unfinished(root))
    checkpoints.add_digests(root, reached)
    checkpoints.retire(root, KEEP_LAST, KEEP_EVERY)
    assert checkpoints.complete_iterations(root) == sorted({*range(10, reached + 1, 10), reached - 1, reached})
    print(f"{KILLS} kills, {unfinished} of them in the middle of a save; {reached} steps")
    assert unfinished, "none hit a save: how many do is chance"
