-- How much of a prompt each rank holds, for all ranks of a model in one call. Reads only.
-- KEYS: 1 generation, 2 ranks, 3.. lives of the ranks (as many as there are epochs), then sets
-- ARGV: 1 generation the caller knows, 2 epochs of the ranks, 3 program, 4.. block keys of the
--       prompt, eight bytes each, once per block size
-- Answers three numbers per rank, tokens by tier, 2^32-1 for a rank that isn't there any more; or,
-- to a caller who knows another generation, the present one and the table.
local call, sub, floor = redis.call, string.sub, math.floor
local epochs = cmsgpack.unpack(ARGV[2])
local ABSENT = 4294967295

local function is_known()
  local found = call('MGET', KEYS[1], unpack(KEYS, 3, 2 + #epochs))
  if (found[1] or '') ~= ARGV[1] then return false end
  for at, epoch in ipairs(epochs) do
    local life = found[1 + at]
    if life and life ~= epoch then return false end
    if not life then epochs[at] = false end
  end
  return true
end

if not is_known() then
  return {call('GET', KEYS[1]) or '', call('HGETALL', KEYS[2])}
end

local program, at = cmsgpack.unpack(ARGV[3]), 0
local function take()
  at = at + 1
  return program[at]
end

-- One group of one rank: block size, blocks needed at the boundary, and its sets, fastest first.
local function take_group()
  local group = {tiers = {}, sets = {}}
  group.list = take()
  group.blocks = ARGV[3 + group.list]
  group.size = take()
  group.needed = take()
  for each = 1, take() do
    group.tiers[each] = take()
    group.sets[each] = KEYS[take()]
  end
  return group
end

local function leave_out_empty_sets(group)
  if #group.sets < 2 then return end
  local tiers, sets = {}, {}
  for each, set in ipairs(group.sets) do
    if call('EXISTS', set) == 1 then
      tiers[#tiers + 1], sets[#sets + 1] = group.tiers[each], set
    end
  end
  group.tiers, group.sets = tiers, sets
end

local function is_in(set, blocks, number)
  return call('SISMEMBER', set, sub(blocks, 8 * number + 1, 8 * number + 8)) == 1
end

local function is_in_any(sets, blocks, number)
  local key = sub(blocks, 8 * number + 1, 8 * number + 8)
  for _, set in ipairs(sets) do
    if call('SISMEMBER', set, key) == 1 then return true end
  end
  return false
end

-- Depth of the last rank that held anything, by list of blocks.
local neighbour = {}

-- How many of the prompt's blocks are held, by bisection: held means reachable. It begins where the
-- last rank ended, since many hold the same beginning and nothing more: two probes then. Asking for
-- several blocks per call (SMISMEMBER) takes fewer calls and more time.
local function depth(is_held, where, blocks, list)
  if #blocks == 0 or not is_held(where, blocks, 0) then return 0 end
  local low, high, near = 1, #blocks / 8, neighbour[list]
  if near then
    if near > 1 and not is_held(where, blocks, near - 1) then
      high = near - 1
    elseif near == high or not is_held(where, blocks, near) then
      return near
    else
      low = near + 1
    end
  end
  while low < high do
    local middle = floor((low + high) / 2)
    if is_held(where, blocks, middle) then low = middle + 1 else high = middle end
  end
  neighbour[list] = low
  return low
end

local function depth_of(group)
  return depth(is_in_any, group.sets, group.blocks, group.list)
end

-- Largest end before which a window or state group has the blocks it needs.
local function boundary(group, end_tokens, step_tokens)
  local step, stop = step_tokens / group.size, end_tokens / group.size
  local number = stop
  while number > 0 and stop - number < group.needed do
    number = number - 1
    if not is_in_any(group.sets, group.blocks, number) then
      number = number - number % step
      stop = number
    end
  end
  return stop * group.size
end

-- Where all groups of a hybrid model let a hit end.
local function agreed_tokens(fulls, others, step)
  local stop
  for _, full in ipairs(fulls) do
    local tokens = depth_of(full) * full.size
    if not stop or tokens < stop then stop = tokens end
  end
  stop = stop - stop % step
  local is_agreed
  repeat
    is_agreed = true
    for _, other in ipairs(others) do
      local allowed = boundary(other, stop, step)
      if allowed < stop then stop, is_agreed = allowed, false end
    end
  until is_agreed
  return stop
end

-- The fastest set that holds a block of which it is known that one does.
local function fastest(full, number)
  for each = 1, #full.sets - 1 do
    if is_in(full.sets[each], full.blocks, number) then return each end
  end
  return #full.sets
end

-- First block after `low` that isn't at the tier of `low`, at most `high`, which isn't either.
local function change(full, low, high, tier)
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    if fastest(full, middle) == tier then low = middle else high = middle end
  end
  return high
end

-- Up to so many blocks are asked for one by one. Of more, so many at even distances.
local COUNTED, SAMPLES = 64, 16

-- Blocks to ask for, always the first and the last.
local function samples(blocks)
  local numbers, step = {}, 1
  if blocks > COUNTED then step = math.ceil(blocks / SAMPLES) end
  for number = 0, blocks - 2, step do numbers[#numbers + 1] = number end
  numbers[#numbers + 1] = blocks - 1
  return numbers
end

-- For each of these blocks, which are held, the fastest set that has it.
local function fastest_of(full, numbers)
  local found, last, keys, places = {}, #full.sets, {}, {}
  for place, number in ipairs(numbers) do
    local key = sub(full.blocks, 8 * number + 1, 8 * number + 8)
    found[place], keys[place], places[place] = last, key, place
  end
  for each = 1, last - 1 do
    local answers, left, where = call('SMISMEMBER', full.sets[each], unpack(keys)), {}, {}
    for at, place in ipairs(places) do
      if answers[at] == 1 then
        found[place] = each
      else
        left[#left + 1], where[#where + 1] = keys[at], place
      end
    end
    keys, places = left, where
    if #keys == 0 then break end
  end
  return found
end

-- Each of the first blocks, all held, counts at its fastest tier. With one tier that is known. With
-- several nothing says that a tier holds a run of them, and asking for each block of 64 ranks took
-- 12 ms. So a long prompt is sampled, and where two samples differ the change between them is
-- searched for: exact for runs longer than a sixteenth. Engines evict leaves first, so runs are long.
local function by_tier(full, blocks)
  local counts = {0, 0, 0}
  if #full.sets < 2 or blocks == 0 then
    counts[full.tiers[1] or 1] = blocks
    return counts
  end
  local function count(each, number)
    counts[full.tiers[each]] = counts[full.tiers[each]] + number
  end
  local numbers = samples(blocks)
  local found = fastest_of(full, numbers)
  for at = 1, #numbers - 1 do
    local from, to, tier, other = numbers[at], numbers[at + 1], found[at], found[at + 1]
    local border = to
    if other ~= tier then border = change(full, from, to, tier) end
    count(tier, border - from)
    count(other, to - border)
  end
  count(found[#found], 1)
  return counts
end

-- Tokens by tier of one rank.
local function tokens_held(step)
  local fulls, others = {}, {}
  for each = 1, take() do fulls[each] = take_group() end
  for each = 1, take() do others[each] = take_group() end
  local first = fulls[1]
  if not first then return {0, 0, 0} end
  for _, each in ipairs(fulls) do leave_out_empty_sets(each) end
  local blocks
  if #fulls == 1 and #others == 0 then
    blocks = depth_of(first)
  else
    blocks = agreed_tokens(fulls, others, step) / first.size
  end
  local counts = by_tier(first, blocks)
  for tier = 1, 3 do counts[tier] = counts[tier] * first.size end
  return counts
end

-- The same of a rank with one full group on one tier, as nearly all are, at a third of the cost.
local plain = {0, 0, 0}
local function tokens_held_plainly()
  local list, size, tier, set = program[at + 1], program[at + 2], program[at + 3], program[at + 4]
  at = at + 4
  plain[1], plain[2], plain[3] = 0, 0, 0
  plain[tier] = depth(is_in, KEYS[set], ARGV[3 + list], list) * size
  return plain
end

local answers, absent = {}, {ABSENT, ABSENT, ABSENT}
for rank, epoch in ipairs(epochs) do
  local step, counts = take(), nil
  if step == 0 then counts = tokens_held_plainly() else counts = tokens_held(step) end
  if not epoch then counts = absent end
  answers[rank] = struct.pack('<I4I4I4', counts[1], counts[2], counts[3])
end
return table.concat(answers)
