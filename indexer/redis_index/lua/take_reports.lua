-- Takes every message that waits; the time comes first (microseconds).
-- KEYS: 1 reports of the model
if redis.call('TYPE', KEYS[1]).ok ~= 'list' then redis.call('UNLINK', KEYS[1]) end
local time = redis.call('TIME')
local answer = redis.call('LRANGE', KEYS[1], 0, -1)
redis.call('UNLINK', KEYS[1])
table.insert(answer, 1, string.format('%d%06d', time[1], time[2]))
return answer
