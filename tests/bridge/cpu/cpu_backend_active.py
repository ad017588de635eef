"""Imported once by the tests' fork server: a process in which the backend is active and Megatron is imported."""

import warnings

warnings.simplefilter("ignore")

from megaboa.bridge.cpu import activate

activate()

import megatron.bridge.recipes.common
import megatron.bridge.training.gpt_step
import megatron.bridge.training.pretrain  # noqa: F401
import torch

torch.set_num_threads(1)
