"""What things cost, measured beside a plainer way of doing the same in the same run."""
