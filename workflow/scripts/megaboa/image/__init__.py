"""Container images: named by digest, built or taken as they are, and run. Standard library only."""
