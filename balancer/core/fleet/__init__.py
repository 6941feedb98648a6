"""Who is in the fleet and how it is: the snapshot that routing reads, health, membership."""
