-- Removes a rank. Its sets are freed by another thread, however big.
-- KEYS: 3 life, 4 state, 5.. everything else of the rank
-- ARGV: 1 owner, 2 rank digest, 3 lease (ms), 4 '1': keep the state, it will be written anew
remove_spoilt()
local owner = tonumber(redis.call('HGET', KEYS[4], 'owner') or '') or 0
if owner > tonumber(ARGV[1]) then return 'owner' end
for at = 3, #KEYS do
  if at ~= 4 or ARGV[4] ~= '1' then redis.call('UNLINK', KEYS[at]) end
end
redis.call('HDEL', KEYS[4], 'seq')
if redis.call('HDEL', KEYS[2], ARGV[2]) == 1 then bump_generation(ARGV[3]) end
return 'ok'
