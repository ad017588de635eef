"""The entrypoint of one rank; the launcher tells it which one by RANK, LOCAL_RANK and WORLD_SIZE."""

from megaboa.bridge.process import die_with_parent
from megaboa.bridge.train import main

die_with_parent()  # also in the checkpoint writers, which are spawned and import this file again

if __name__ == "__main__":
    main()
