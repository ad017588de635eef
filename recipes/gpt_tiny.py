"""A GPT of two layers on Bridge's mock data: the smallest complete recipe."""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer


def configure(hidden_size: int = 64, seq_length: int = 64) -> ConfigContainer:
    config = _pretrain_common()
    config.model = GPTModelProvider(
        num_layers=2,
        hidden_size=hidden_size,
        num_attention_heads=4,
        seq_length=seq_length,
        make_vocab_size_divisible_by=128,
    )
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.vocab_size = 511
    config.dataset.seq_length = seq_length
    config.train.train_iters = 10
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 2
    config.validation.eval_iters = 1
    config.validation.eval_interval = 10
    config.scheduler.lr_warmup_iters = 2
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    return config
