"""What training prints, read back as numbers: consoles of Megatron-LM and its relatives, and TensorBoard's event files.

Our own runs write their steps down (`observe.steps`); this is for runs of others, and as a cross-check of ours.
"""
