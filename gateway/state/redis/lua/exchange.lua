-- Merge what a gateway has learned, and return what all gateways have learned since its last call.
-- gateway/state/exchange.py describes the protocol. O(entries given and returned x log entries)
-- ARGV: source, number, start, cursor, lifetime of a source and of a history in us, maximum number of
--       histories, maximum number of returned entries, decay per choice, number of tallies,
--       then for each tally, and then for each restored total: key, choices, accepted, rejected
-- Returns {start} after another start, otherwise {start, cursor, 1 if there is more,
--       then for each changed history: key, its value (see HISTORY)}.

local source, number, start = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local cursor, source_us, history_us = ARGV[4], ARGV[5], tonumber(ARGV[6])
local most_histories, most_news, decay = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local FIRST, FIELDS = 11, 4
local first_restored = FIRST + FIELDS * ARGV[10]

local START = POOL .. 'exchange-start'       -- string: time at which the memory of the exchange began
local REVISION = POOL .. 'exchange-revision' -- string: the last revision
-- hash: key -> time of the last change, and choices, accepted and rejected tokens of the restored
-- tally and of the tally since then, separated by spaces
local HISTORY = POOL .. 'history'
local CHANGES = POOL .. 'history-changes'    -- sorted set: key -> revision of its last change
local NUMBER_OF = POOL .. 'exchange:'        -- string of a source: the number of its last update

local now = now_us()
redis.call('SET', START, digits(now + 1), 'NX')
local began = redis.call('GET', START)
if began ~= start then return { tonumber(began) } end

-- Return the fields of a history, or zeros for an unknown key.
local function history_of(key)
  local fields = {}
  for field in (redis.call('HGET', HISTORY, key) or '0 0 0 0 0 0 0'):gmatch('%S+') do
    table.insert(fields, tonumber(field))
  end
  return fields
end

local function put_history(key, fields)
  local value = ('%.0f %.0f %.17g %.17g %.0f %.17g %.17g'):format(now, unpack(fields, 2))
  redis.call('HSET', HISTORY, key, value)
  redis.call('ZADD', CHANGES, redis.call('INCR', REVISION), key)
end

local function apply()
  for at = FIRST, #ARGV, FIELDS do
    local key, choices = ARGV[at], tonumber(ARGV[at + 1])
    local accepted, rejected = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local known = history_of(key)
    if at < first_restored then
      local kept = decay ^ choices
      known[5], known[6] = known[5] + choices, known[6] * kept + accepted
      known[7] = known[7] * kept + rejected
      put_history(key, known)
    elseif choices > known[2] then
      known[2], known[3], known[4] = choices, accepted, rejected
      put_history(key, known)
    end
  end
end

if number > tonumber(redis.call('GET', NUMBER_OF .. source) or 0) then
  apply()
  redis.call('SET', NUMBER_OF .. source, digits(number))
end
redis.call('PEXPIRE', NUMBER_OF .. source, math.ceil(source_us / 1000))

-- The first histories are the oldest ones.
for _, oldest in ipairs(redis.call('ZRANGE', CHANGES, 0, MOST_PRUNED - 1)) do
  local crowded = redis.call('ZCARD', CHANGES) > most_histories
  if not crowded and now - history_of(oldest)[1] < history_us then break end
  redis.call('HDEL', HISTORY, oldest)
  redis.call('ZREM', CHANGES, oldest)
end
for _, key in ipairs({ START, REVISION, HISTORY, CHANGES }) do
  redis.call('PEXPIRE', key, math.ceil(history_us / 1000))
end

local changed = redis.call('ZRANGEBYSCORE', CHANGES, '(' .. cursor, '+inf', 'LIMIT', 0, most_news)
local last = tonumber(redis.call('GET', REVISION) or 0)
local more = #changed == most_news
if more then last = tonumber(redis.call('ZSCORE', CHANGES, changed[#changed])) end
local found = { tonumber(began), last, more and 1 or 0 }
for _, key in ipairs(changed) do
  table.insert(found, key)
  table.insert(found, redis.call('HGET', HISTORY, key))
end
return found
