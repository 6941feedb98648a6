-- Makes the caller the owner of a rank, newer than any before, and tells what there is of it.
-- KEYS: 3 life, 4 state
-- ARGV: 1 rank digest, 2 lease (ms), 3 token under which the caller lost it ('': it never did)
local owner, free = unpack(redis.call('HMGET', KEYS[4], 'owner', 'free'))
if owner and not free and ARGV[3] ~= '' and tonumber(owner) > tonumber(ARGV[3]) then
  return false
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local token = string.format('%.0f', math.max(now, tonumber(owner or '0') + 1))
redis.call('HSET', KEYS[4], 'owner', token)
redis.call('HDEL', KEYS[4], 'free')
redis.call('PEXPIRE', KEYS[4], ARGV[2])
local kept = redis.call('HMGET', KEYS[4], 'epoch', 'seq', 'digest', 'facts')
return {token, redis.call('GET', KEYS[3]), redis.call('HGET', KEYS[2], ARGV[1]),
  kept[1], kept[2], kept[3], kept[4]}
