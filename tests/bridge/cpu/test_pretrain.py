"""Bridge's own pretrain() on the CPU: layouts agree, and a resumed run continues bit for bit."""

import math
import multiprocessing

import pytest
from cpu_ranks import on_cpu

pytestmark = pytest.mark.slow


def _pretrain(folder: str, model: dict, checkpoint: dict) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step: what this rank knows of them."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge.cpu import refuse
    from megaboa.bridge.process import save_in_foreground

    save_in_foreground()

    class Record(Callback):
        steps: dict[int, tuple[float, float]] = {}  # noqa: RUF012

        def on_train_step_end(self, context):
            if context.loss_dict:
                loss, norm = context.loss_dict["lm loss"], context.grad_norm
                self.steps[context.state.train_state.step] = (float(loss), float(norm))

    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=32,
        vocab_size=128,
        make_vocab_size_divisible_by=64,  # no padding of the vocabulary, also in two ranks
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        bf16=False,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **model},
    )
    cfg.mixed_precision = None
    cfg.optimizer.bf16 = cfg.optimizer.fp16 = False
    cfg.optimizer.params_dtype = torch.float32
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-2, 1e-3
    cfg.scheduler.lr_warmup_iters, cfg.scheduler.lr_decay_iters = 0, 10
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 4, 4, 2
    cfg.validation.eval_iters = 0
    cfg.dataset.seq_length, cfg.dataset.num_workers = 32, 0
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 127
    cfg.logger.tensorboard_dir = f"{folder}/tensorboard"
    cfg.dist.distributed_backend = "gloo"
    cfg.dist.use_gloo_process_groups = False
    cfg.checkpoint.save, cfg.checkpoint.load = f"{folder}/checkpoints", None
    cfg.checkpoint.save_interval = 2
    cfg.checkpoint.dist_ckpt_optim_fully_reshardable = True
    for name, value in checkpoint.items():
        setattr(cfg.checkpoint, name, value)
    refuse(cfg)
    record = Record()
    pretrain(cfg, forward_step, callbacks=[record])
    assert not multiprocessing.active_children(), "a save starts no process"
    return record.steps


def _train(folder, world_size=1, model=None, **checkpoint) -> dict[int, tuple[float, float]]:
    """What the last rank recorded."""
    return on_cpu(_pretrain, str(folder), model or {}, checkpoint, world_size=world_size)[-1]


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


def test_a_resumed_run_continues_bit_for_bit_dropout_included(tmp_path):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    whole = _train(tmp_path / "whole", model=dropout)
    rest = _train(
        tmp_path / "rest", model=dropout, load=str(tmp_path / "whole" / "checkpoints"), ckpt_step=2, save_interval=4
    )
    assert len(rest) == 2
    assert rest == {step: values for step, values in whole.items() if step in rest}
