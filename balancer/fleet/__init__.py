"""Who is in the fleet and how it is: membership, probes, run-time changes, and what operators ask."""
