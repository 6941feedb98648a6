-- Takes ranks whose lease has ended out of the table.
-- KEYS: 3.. lives;  ARGV: 1 lease (ms), 2.. their rank digests
local swept = 0
for at = 3, #KEYS do
  if redis.call('EXISTS', KEYS[at]) == 0 then
    swept = swept + redis.call('HDEL', KEYS[2], ARGV[at - 1])
  end
end
if swept > 0 then bump_generation(ARGV[1]) end
return swept
