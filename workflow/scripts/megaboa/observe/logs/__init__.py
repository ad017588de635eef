"""Parses logs of training: consoles of Megatron-LM and its relatives, and TensorBoard's event files.

Our own runs record their steps (`observe.steps`). This is for other runs, and to cross-check ours.
"""
