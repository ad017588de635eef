"""What ranks are started with: network environment variables, and Nsight Systems around some ranks.

Standard library only: this runs on the compute host, outside the container.
"""
