"""The records that stages hand to each other, by subject; `base` reads and writes them."""

from megaboa.records.attempts import *
from megaboa.records.base import *
from megaboa.records.calibrations import *
from megaboa.records.data import *
from megaboa.records.gpus import *
from megaboa.records.images import *
from megaboa.records.models import *
from megaboa.records.preflights import *
from megaboa.records.profiles import *
from megaboa.records.reports import *
from megaboa.records.runs import *
from megaboa.records.summaries import *
from megaboa.records.trials import *
