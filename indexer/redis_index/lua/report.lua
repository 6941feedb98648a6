-- Puts one message of a balancer, with the time, behind those that wait. The oldest leave when there
-- are too many.
-- KEYS: 1 reports of the model. ARGV: 1 message, 2 most messages, 3 how long they are kept (ms)
if redis.call('TYPE', KEYS[1]).ok ~= 'list' then redis.call('UNLINK', KEYS[1]) end
local time = redis.call('TIME')
redis.call('RPUSH', KEYS[1], string.format('%d%06d ', time[1], time[2]) .. ARGV[1])
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'ok'
