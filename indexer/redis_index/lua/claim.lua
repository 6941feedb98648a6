-- Makes the caller the owner of a rank, newer than any before, and tells what there is of it.
-- What can't be ours is lost: state that doesn't read as ours, keys of another type. Then the rank
-- doesn't live any more.
-- KEYS: 3 life, 4 state
-- ARGV: 1 rank digest, 2 lease (ms), 3 token under which the caller lost it ('': it never did)
local is_spoilt = remove_spoilt()

-- A whole number that Lua has exactly; nil for anything else.
local function whole(text)
  local found = #text <= 16 and string.find(text, '^%d+$') and tonumber(text)
  return found and found <= 9e15 and found or nil
end

-- Nothing is no number, and no fault.
local function number(text)
  local found = text and whole(text)
  if text and not found then is_spoilt = true end
  return found or nil
end

local state = redis.call('HMGET', KEYS[4], 'owner', 'free', 'epoch', 'seq', 'digest')
local owner, free, seq, digest = number(state[1]), state[2], state[4], state[5]
if owner and not free and ARGV[3] ~= '' and owner > tonumber(ARGV[3]) then
  return false
end
local life = redis.call('GET', KEYS[3])
number(life)
number(state[3])
if seq and not (whole(seq) or seq == '-1' or string.find(seq, '^part%d+$') or seq == 'begin') then
  is_spoilt = true
end
-- 64 bits: as many as 20 digits, which Lua compares as text.
if digest and (not string.find(digest, '^%d*$') or #digest > 20
    or (#digest == 20 and digest > '18446744073709551615')) then
  is_spoilt = true
end
if is_spoilt then
  redis.call('HDEL', KEYS[4], 'epoch', 'seq', 'digest', 'facts')
  redis.call('UNLINK', KEYS[3])
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local token = string.format('%.0f', math.max(now, (owner or 0) + 1))
redis.call('HSET', KEYS[4], 'owner', token)
redis.call('HDEL', KEYS[4], 'free')
redis.call('PEXPIRE', KEYS[4], ARGV[2])
local kept = redis.call('HMGET', KEYS[4], 'epoch', 'seq', 'digest', 'facts')
return {token, is_spoilt and '1' or '', life, redis.call('HGET', KEYS[2], ARGV[1]),
  kept[1], kept[2], kept[3], kept[4]}
