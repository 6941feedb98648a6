-- Applies one update of one rank as a whole, if the fence lets it.
-- KEYS: 3 life, 4 state, 5.. what the program names
-- ARGV: 1 step, 2 owner, 3 epoch, 4 last batch so far, 5 this batch, 6 digest, 7 facts ('':
--       unchanged), 8 lease (ms), 9 rank digest, 10 its description ('': unchanged), 11 bytes per
--       row, 12 program, 13.. what the program's steps need
-- Steps: `next` goes on after a batch; `open` begins an epoch; `begin`, `part` and `end` write a
-- rank anew, which doesn't live in between.
local step, mine, lease = ARGV[1], tonumber(ARGV[2]), ARGV[8]
if step == 'begin' then remove_spoilt() end
local found = redis.call('HMGET', KEYS[4], 'owner', 'epoch', 'seq')
local owner, epoch, seq = tonumber(found[1] or ''), tonumber(found[2] or ''), found[3]
local begins = step == 'open' or step == 'begin'

if owner and owner > mine then return 'owner' end
-- Only who claims a rank opens its epochs: while it is ours, a newer one is nobody's.
if owner ~= mine and epoch and epoch > tonumber(ARGV[3]) then return 'stale' end
if step == 'open' and epoch == tonumber(ARGV[3]) then return 'stale' end
if not begins then
  if owner ~= mine or epoch ~= tonumber(ARGV[3]) or seq ~= ARGV[4] then return 'lost' end
  if step == 'next' and redis.call('GET', KEYS[3]) ~= ARGV[3] then return 'lost' end
end

-- First what needs room: without any nothing at all is changed.
redis.call('HSET', KEYS[4], 'owner', ARGV[2], 'epoch', ARGV[3], 'seq', ARGV[5],
  'digest', ARGV[6])
if ARGV[7] ~= '' then redis.call('HSET', KEYS[4], 'facts', ARGV[7]) end
redis.call('PEXPIRE', KEYS[4], lease)
if step == 'begin' then
  redis.call('UNLINK', KEYS[3])
elseif step == 'open' or step == 'end' then
  redis.call('SET', KEYS[3], ARGV[3], 'PX', lease)
end

local program = cmsgpack.unpack(ARGV[12])
local blob = 13
for at = 1, #program, 2 do
  local what, key = program[at], KEYS[program[at + 1]]
  if what == 0 then
    redis.call('UNLINK', key)
  else
    if what == 1 then spread('SADD', key, ARGV[blob], 8)
    elseif what == 2 then spread('SREM', key, ARGV[blob], 8)
    elseif what == 3 then spread_rows(key, ARGV[blob], tonumber(ARGV[11]))
    elseif what == 5 then spread_rows(key, ARGV[blob], 24)
    else spread('HDEL', key, ARGV[blob], 8) end
    redis.call('PEXPIRE', key, lease)
    blob = blob + 1
  end
end

if ARGV[10] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[9], ARGV[10])
  redis.call('PEXPIRE', KEYS[2], lease)
  bump_generation(lease)
end
return 'ok'
