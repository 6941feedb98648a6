"""What is in flight on each rank and what it will hold; how fast ranks and transfers are."""
