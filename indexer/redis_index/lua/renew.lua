-- Extends a rank's lease if Redis still has what its owner wrote last.
-- KEYS: 3 life, 4 state, 5.. everything else of the rank
-- ARGV: 1 owner, 2 epoch, 3 last batch, 4 lease (ms), 5 rank digest, 6 its description,
--       7 '1': whatever their leases are (an earlier owner may have had a longer one)
local found = redis.call('HMGET', KEYS[4], 'owner', 'seq', 'epoch')
local owner = tonumber(found[1] or '')
if owner and owner > tonumber(ARGV[1]) then return 'owner' end
if owner ~= tonumber(ARGV[1]) or found[2] ~= ARGV[3] or found[3] ~= ARGV[2] then
  return 'lost'
end
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return 'lost' end
if not redis.call('GET', KEYS[1]) then return 'lost' end
-- A change of trust has no number of its own.
if redis.call('HGET', KEYS[2], ARGV[5]) ~= ARGV[6] then return 'lost' end
-- One write at each heartbeat, so that a server that takes none is noticed without an event.
redis.call('PEXPIRE', KEYS[4], ARGV[4])
-- Every key lasts as long as the life, or longer. Asked every second, extended every half minute.
if ARGV[7] == '1' or redis.call('PTTL', KEYS[3]) < tonumber(ARGV[4]) * 3 / 4 then
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[4]) end
end
return 'ok'
