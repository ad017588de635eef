"""The bundle: an experiment as one RO-Crate, from which others can rebuild its figures and, on a CPU, its runs."""
