-- Before every script that writes. Scripts declare every key they touch; KEYS[1] is the model's
-- generation and KEYS[2] its table of ranks.

-- Readers notice that the table has changed. Microseconds, so that a number never comes twice,
-- not even after everything was lost.
local function bump_generation(lease_ms)
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local before = tonumber(redis.call('GET', KEYS[1]) or '') or 0
  redis.call('SET', KEYS[1], string.format('%.0f', math.max(now, before + 1)), 'PX', lease_ms)
end

-- Lua's stack has room for 8,000 values.
local AT_ONCE = 4000

-- Run `command key part part ...` over a string of parts of `width` bytes.
local function spread(command, key, blob, width)
  local parts, count = {}, 0
  for at = 1, #blob, width do
    count = count + 1
    parts[count] = string.sub(blob, at, at + width - 1)
    if count == AT_ONCE then
      redis.call(command, key, unpack(parts, 1, count))
      count = 0
    end
  end
  if count > 0 then redis.call(command, key, unpack(parts, 1, count)) end
end

-- HSET key hash value hash value ... over a string of eight bytes and a value, again and again.
local function spread_rows(key, blob, width)
  local parts, count = {}, 0
  for at = 1, #blob, width do
    parts[count + 1] = string.sub(blob, at, at + 7)
    parts[count + 2] = string.sub(blob, at + 8, at + width - 1)
    count = count + 2
    if count >= AT_ONCE then
      redis.call('HSET', key, unpack(parts, 1, count))
      count = 0
    end
  end
  if count > 0 then redis.call('HSET', key, unpack(parts, 1, count)) end
end

-- A key of ours to which somebody gave another type: every command on it would fail. Whether it was.
local function remove_unless(kind, key)
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return false end
  redis.call('UNLINK', key)
  return true
end

-- Generation, table of ranks, life and state, as far as they are of another type.
local function remove_spoilt()
  local is_spoilt = false
  for at, kind in ipairs({'string', 'hash', 'string', 'hash'}) do
    if remove_unless(kind, KEYS[at]) then is_spoilt = true end
  end
  return is_spoilt
end
