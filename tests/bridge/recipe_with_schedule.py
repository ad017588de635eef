"""A recipe that sets fields that keys of the experiment may leave to it, or take away."""

from gpt_of_a_recipe import tiny
from megatron.bridge.models.gpt_provider import GPTModelProvider


def configure():
    config = tiny(GPTModelProvider)
    config.scheduler.lr_decay_iters, config.validation.eval_interval = 15, 3
    return config
