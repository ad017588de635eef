"""Megaboa: Megatron-Bridge pretraining experiments as one declarative workflow."""

__version__ = "1.0.0"
