-- A number per rank that is another one after each heartbeat of its indexer: when its state would
-- leave, which each heartbeat and each write moves on. Reads only.
-- KEYS: states
local signs = {}
for at, key in ipairs(KEYS) do signs[at] = redis.call('PEXPIRETIME', key) end
return signs
