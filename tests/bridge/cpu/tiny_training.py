"""A tiny model that Bridge's own pretrain() trains on the CPU."""

from typing import Any


def configuration(folder: str, model: dict, checkpoint: dict) -> Any:
    """Four steps, unless told otherwise; `model` and `checkpoint`: fields of these parts."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common

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
    return cfg


def recorder() -> Any:
    """A callback whose `steps` hold loss and gradient norm by step: what this rank knows of them."""
    from megatron.bridge.training.callbacks import Callback

    class Record(Callback):
        def __init__(self):
            self.steps: dict[int, tuple[float, float]] = {}

        def on_train_step_end(self, context):
            if context.loss_dict:
                loss, norm = context.loss_dict["lm loss"], context.grad_norm
                self.steps[context.state.train_state.step] = (float(loss), float(norm))

    return Record()
