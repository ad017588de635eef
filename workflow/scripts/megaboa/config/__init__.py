"""The experiment file: its keys, how it is read, and its checks."""

from megaboa.config.load import DEFAULT_CONFIG, LoadedExperiment, command_line, load, nested
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.config.problems import ConfigError, Problem

__all__ = ["DEFAULT_CONFIG", "ConfigError", "Experiment", "LoadedExperiment", "Model", "Problem", "command_line"]
__all__ += ["load", "nested"]
