"""Facts from a flat list of names, for tables of cases."""

import dataclasses

from megaboa.check.facts import Cluster, Facts, Kernels, Model, Profiling, Training
from megaboa.layout import Layout

SECTIONS = {"layout": Layout, "model": Model, "training": Training, "kernels": Kernels}
SECTIONS |= {"profiling": Profiling, "cluster": Cluster}


def facts(**values) -> Facts:
    """`facts(tp=2, heads=4)`: every name goes to the section that has it."""
    parts = {}
    for name, section in SECTIONS.items():
        fields = {field.name for field in dataclasses.fields(section)}
        parts[name] = section(**{key: values[key] for key in values if key in fields})
        values = {key: value for key, value in values.items() if key not in fields}
    assert not values, f"no such facts: {values}"
    return Facts(**parts)
