"""The index in Redis: one writer per rank, any number of readers, one round trip per lookup.

`keys` knows every key, `packing` every value; `connection` is the only module that speaks to Redis
and runs the scripts in `lua/`. `writer` applies updates, keeps leases, and gives back what a
restarted indexer needs; `reader` answers lookups. `redis_index` is both: a `BlockIndex` and a
`RankJournal`. docs/redis-schema.md is the map.
"""
