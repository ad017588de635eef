"""A recipe that fails, where it is told to."""

import sys

from gpt_of_a_recipe import tiny
from megatron.bridge.models.gpt_provider import GPTModelProvider


class Fails(GPTModelProvider):
    def provide(self, *arguments, **named):
        try:
            return {}["model"]
        except KeyError as error:
            raise RuntimeError("no model") from error


def configure(where):
    if where == "configure":
        sys.exit(3)
    config = tiny(Fails)
    if where == "spelling":
        config.optimizer.wieght_decay = 0.5
    return config
