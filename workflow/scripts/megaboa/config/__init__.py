"""The experiment file: what may stand in it, and reading it."""

from megaboa.config.errors import ConfigError, Problem
from megaboa.config.load import LoadedExperiment, command_line, load, nested
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model

__all__ = ["ConfigError", "Experiment", "LoadedExperiment", "Model", "Problem", "command_line", "load", "nested"]
