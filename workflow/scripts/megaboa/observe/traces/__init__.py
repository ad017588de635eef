"""From captures of a profiler (Nsight Systems, PyTorch) to what a step's time went into. Captures are only read."""
