"""What could never work, known before anything is submitted: rules over plain facts. Standard library only."""
