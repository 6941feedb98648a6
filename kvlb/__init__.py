"""The `kvlb` command: composes indexer, balancer and simulator."""
