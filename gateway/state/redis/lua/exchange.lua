-- Merge what a gateway has learned, and return what all gateways have learned since its last call.
-- gateway/state/exchange.py describes the protocol. O(entries given and returned x log entries)
-- ARGV: source, number, start, cursor, lifetime of a source and of a history in us, maximum number of
--       histories, maximum number of returned entries, decay per choice, number of tallies, number of
--       restored totals, then for each tally and restored total: key, choices, accepted, rejected,
--       then for each booking: name, microseconds until it is due, since it was made and until it
--       ends, 1 if it is closed, its other fields as JSON
-- Returns {start} after another start, otherwise {start, cursor, 1 if there is more, expired claims,
--       number of changed histories, then for each of them: key, its value (see HISTORY), then for each changed booking:
--       name, microseconds until it is due and since it was made, 1 if it is closed, other fields}.

local source, number, start = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local cursor, source_us, history_us = ARGV[4], ARGV[5], tonumber(ARGV[6])
local most_histories, most_news, decay = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local FIRST, FIELDS, BOOKING_FIELDS = 12, 4, 6
local first_restored = FIRST + FIELDS * ARGV[10]
local first_booking = first_restored + FIELDS * ARGV[11]

local START = POOL .. 'exchange-start'       -- string: time at which the memory of the exchange began
local REVISION = POOL .. 'exchange-revision' -- string: the last revision
-- hash: key -> time of the last change, and choices, accepted and rejected tokens of the restored
-- tally and of the tally since then, separated by spaces
local HISTORY = POOL .. 'history'
local CHANGES = POOL .. 'history-changes'    -- sorted set: key -> revision of its last change
-- hash: name -> times at which a booking is due and was made, 1 if it is closed, and its other fields
local BOOKINGS = POOL .. 'bookings'
local BOOKING_CHANGES = POOL .. 'booking-changes' -- sorted set: name -> revision of its last change
local BOOKING_ENDS = POOL .. 'booking-ends'       -- sorted set: name -> time at which it ends
local NUMBER_OF = POOL .. 'exchange:'        -- string of a source: the number of its last update

local now = now_us()
redis.call('SET', START, digits(now + 1), 'NX')
local began = redis.call('GET', START)
if began ~= start then return { tonumber(began) } end
prune(now)

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

local function booking_of(name)
  local value = redis.call('HGET', BOOKINGS, name)
  if value then return value:match('^(%S+) (%S+) (%S+) (.*)$') end
end

-- Note a booking. A closed booking never opens again.
local function put_booking(name, due_us, made_us, ends_us, closed, rest)
  local known, _, was_closed = booking_of(name)
  if tonumber(ends_us) < 0 or known and (was_closed == '1' or closed == '0') then return end
  local due, made = digits(now + due_us), digits(now - made_us)
  redis.call('HSET', BOOKINGS, name, due .. ' ' .. made .. ' ' .. closed .. ' ' .. rest)
  redis.call('ZADD', BOOKING_CHANGES, redis.call('INCR', REVISION), name)
  redis.call('ZADD', BOOKING_ENDS, now + ends_us, name)
end

local function apply()
  for at = FIRST, first_booking - 1, FIELDS do
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
  for at = first_booking, #ARGV, BOOKING_FIELDS do
    put_booking(unpack(ARGV, at, at + BOOKING_FIELDS - 1))
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
for _, name in ipairs(redis.call('ZRANGEBYSCORE', BOOKING_ENDS, '-inf', now, 'LIMIT', 0, MOST_PRUNED)) do
  redis.call('HDEL', BOOKINGS, name)
  redis.call('ZREM', BOOKING_CHANGES, name)
  redis.call('ZREM', BOOKING_ENDS, name)
end
for _, key in ipairs({ START, REVISION, HISTORY, CHANGES, BOOKINGS, BOOKING_CHANGES, BOOKING_ENDS,
  EXPIRED_CLAIMS }) do
  redis.call('PEXPIRE', key, math.ceil(history_us / 1000))
end

local last = tonumber(redis.call('GET', REVISION) or 0)
local reached = last

-- Return the first entries that have changed after the cursor.
local function changed(revisions)
  local found = redis.call('ZRANGEBYSCORE', revisions, '(' .. cursor, '+inf', 'LIMIT', 0, most_news)
  if #found == most_news then
    reached = math.min(reached, tonumber(redis.call('ZSCORE', revisions, found[#found])))
  end
  return found
end

local histories, bookings = changed(CHANGES), changed(BOOKING_CHANGES)
local expired = tonumber(redis.call('GET', EXPIRED_CLAIMS) or 0)
local news = { tonumber(began), reached, reached < last and 1 or 0, expired, #histories }
for _, key in ipairs(histories) do
  table.insert(news, key)
  table.insert(news, redis.call('HGET', HISTORY, key))
end
for _, name in ipairs(bookings) do
  local due, made, closed, rest = booking_of(name)
  for _, field in ipairs({ name, digits(due - now), digits(now - made), closed, rest }) do
    table.insert(news, field)
  end
end
return news
