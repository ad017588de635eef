"""Megaboa: Megatron-Bridge pretraining experiments as one declarative workflow."""

__version__ = "0.1.0"
