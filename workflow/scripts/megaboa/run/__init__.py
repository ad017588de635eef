"""Keeping a run alive: attempts, locks, checkpoints. Standard library only: this runs on the compute host."""
