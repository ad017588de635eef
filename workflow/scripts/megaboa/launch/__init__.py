"""What ranks are started with: the network's environment, and Nsight Systems around some. Standard library only: this
runs on the compute host, outside the container."""
