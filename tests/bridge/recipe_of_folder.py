"""A recipe that reads the model in the folder that it is given, and may change it."""

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common


def configure(hf_path, changes=None, data=None):
    config = _pretrain_common()
    config.model = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider(load_weights=False)
    config.model.seq_length = config.dataset.seq_length = 64
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 6, 16, 1
    config.scheduler.lr_warmup_iters = 2
    if data:
        config.dataset.blend = (data, None)
    for field, value in (changes or {}).items():
        setattr(config.model, field, value)
    return config
