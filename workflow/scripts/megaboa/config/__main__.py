"""`python -m megaboa.config FILE`: the mistakes in a file's keys and values, as a call of Snakemake prints them.

`make run` asks here first: of a file that isn't YAML, Snakemake itself says neither name nor line.
"""

import os
import sys

from megaboa.config import load
from megaboa.errors import one_sentence

if __name__ == "__main__":
    with one_sentence():
        load(sys.argv[1:], variables=os.environ)
