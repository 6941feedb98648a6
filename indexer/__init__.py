"""The write path: engines' KV-cache events become an index of who holds which blocks.

In the order an event meets them: `sources` finds each rank's event stream; `ports` and `sockets`
move ZMQ frames to the rank's `subscriber`; `core.stream` puts batches in order and asks for
replays; `rank_writer` has them decoded (`core.events`), turned into index changes
(`core.rank_blocks`) and applied by an index backend (`memory_index`). `followed_rank` keeps that
going for one rank, `service` for a fleet; `status` shows it, `follower` shows one stream.
"""
