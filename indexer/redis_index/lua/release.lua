-- Lets go of ranks that the caller still owns, so that another indexer needn't wait for the lease.
-- All else stays, with its lease: whoever claims a rank next goes on with it.
-- KEYS: 3.. states;  ARGV: their owners
for at = 3, #KEYS do
  remove_unless('hash', KEYS[at])
  if redis.call('HGET', KEYS[at], 'owner') == ARGV[at - 2] then
    redis.call('HSET', KEYS[at], 'free', 1)
  end
end
return 'ok'
