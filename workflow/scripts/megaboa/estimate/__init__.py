"""What a run needs: memory, operations, time and disk, as pure functions of facts. Standard library only."""
