"""What could never work, and what a run needs (memory, operations, time, disk): pure functions of plain facts.

Standard library only.
"""
