"""Starting the ranks of a run. Standard library only: this runs on the compute host, outside the container."""
