"""Train a run whose ranks start inside an image's unpacked root file system, as a runtime would start them.

`python train_in_root.py ROOT results/<experiment>/runs/<run>`: the supervisor stays outside, as on a cluster.
"""

import os
import sys
from pathlib import Path

from megaboa.image import rootfs, runtimes
from megaboa.image.runtimes import Container
from megaboa.paths import RunFolder
from megaboa.run import site, supervisor
from megaboa.scheduler.local import Machine

root, folder = Path(sys.argv[1]), RunFolder(Path(sys.argv[2]))
asked = folder.launch.image
rootfs.prepare(root, asked.mounts)
os.environ.update(rootfs.environment(root, [], {}))
runtimes.RUNTIMES["root"] = rootfs.enter
machine = Machine(Container("root", str(root), asked.mounts, asked.secrets, asked.workdir))
site.here = lambda *arguments, **named: machine
supervisor.train(folder)
