"""Imported once by the tests' fork server: activates the backend, then imports Megatron."""

import gc
import importlib
import warnings

import torch

from megaboa.bridge import cpu, latent_attention

warnings.simplefilter("ignore")
torch.set_num_threads(1)
latent_attention.complete()
cpu.activate()
for _module in ("recipes.common", "training.gpt_step", "training.pretrain"):
    importlib.import_module(f"megatron.bridge.{_module}")
gc.freeze()  # as ranks do: Megatron collects garbage in every save
