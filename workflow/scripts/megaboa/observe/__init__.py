"""What runs did and what they are doing: steps of all attempts, their summary, live progress."""
