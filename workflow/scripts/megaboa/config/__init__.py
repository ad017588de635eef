"""The experiment file: what may stand in it, and reading it."""

from megaboa.config.load import LoadedExperiment, command_line, load, nested
from megaboa.config.models.experiment import Experiment
from megaboa.config.models.model import Model
from megaboa.config.problems import ConfigError, Problem

__all__ = ["ConfigError", "Experiment", "LoadedExperiment", "Model", "Problem", "command_line", "load", "nested"]
