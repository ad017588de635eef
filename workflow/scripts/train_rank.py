"""The entrypoint of one rank; the launcher tells it which one by RANK, LOCAL_RANK and WORLD_SIZE."""

from megaboa.bridge.train import main

if __name__ == "__main__":  # checkpoint writers are spawned, and import this file again
    main()
