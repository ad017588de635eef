"""Analyses captures of a profiler (Nsight Systems, PyTorch): where a step's time goes. Captures are only read."""
