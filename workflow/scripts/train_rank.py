"""The entrypoint of one rank. The launcher says which: by RANK, LOCAL_RANK and WORLD_SIZE, or by SLURM's names.

With --self-test it trains nothing, and says what is here to train with. With --warm it has imports made for ranks that
are started soon, and with --keep it stays and forks the ranks of its node (`launch.tasks: node`).
"""

import sys

from megaboa.bridge import flight, handover, process
from megaboa.scheduler import adopt_rank
from megaboa.scheduler.local import die_with_parent

die_with_parent()  # also in the checkpoint writers, which are spawned and import this file again

if __name__ == "__main__" and "--self-test" in sys.argv:
    from megaboa.bridge.selftest import main as examine

    sys.exit(examine())
elif __name__ == "__main__" and "--warm" in sys.argv:
    handover.start_zygote()
elif __name__ == "__main__" and "--keep" in sys.argv:
    handover.become_zygote()
elif __name__ == "__main__":
    handover.to_zygote()
    adopt_rank()
    flight.on_signal()

    from megaboa.bridge.train import main

    main()
else:
    process.ignore_stop_signal()
