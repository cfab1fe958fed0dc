-- Helpers of the scripts for quotas. The client puts them in front of each script, after pool.lua
-- (gateway/state/redis/quotas.py). The ledger in policies/quotas.py defines what the scripts do, and
-- policies/leaky_bucket.py explains the stack.
--
-- Units are 1 / UNITS of a request or token. A Lua number represents levels up to 150 million tokens
-- exactly.

-- Hash: request -> 'NUMBER REQUESTS TOKENS TENANT'.
local RESERVATIONS = POOL .. 'quota-reservations'
-- Sorted set: request -> time at which its reservation expires.
local ENDS = POOL .. 'quota-reservation-ends'

local UNITS = 60000000
local LIMITS = { 'requests', 'tokens' }
local FIELDS = { 'at', 'number', 'requests_rate', 'requests', 'tokens_rate', 'tokens',
  'reserved', 'settled', 'released' }

-- Hash of a tenant: the FIELDS. `tokens` are units in use, and a rate of 0 means no limit. `at` is
-- the time of these levels, and `number` belongs to the last reservation.
local function account_key(tenant) return POOL .. 'quota:' .. tenant end

-- Sorted set of a tenant: numbers of its open reservations.
local function open_key(tenant) return POOL .. 'open-reservations:' .. tenant end

-- Sorted set of a limit of a tenant, its stack: 'UNITS NUMBER' -> number of the reservation.
local function stack_key(limit, tenant) return POOL .. 'used-' .. limit .. ':' .. tenant end

local accounts = {} -- tenant -> its account, read once

-- Remove the units of the lowest reservation from a number to another, and return the units and the
-- reservation's number, or 0 and nothing. O(log reservations)
local function lift(stack, from, to)
  local found = redis.call('ZRANGEBYSCORE', stack, from, to, 'LIMIT', 0, 1)[1]
  if not found then return 0 end
  redis.call('ZREM', stack, found)
  local units, number = found:match('^(%d+) (%d+)$')
  return tonumber(units), number
end

local function put_units(stack, number, units)
  redis.call('ZADD', stack, number, digits(units) .. ' ' .. number)
end

-- Take units of the reservations up to a number, the highest first, and return how many were taken.
-- O(log reservations) for each reservation whose units are taken
local function take(stack, number, units)
  local left = units
  while left > 0 do
    local highest = redis.call('ZREVRANGEBYSCORE', stack, number, '-inf', 'LIMIT', 0, 1)[1]
    if not highest then break end
    redis.call('ZREM', stack, highest)
    local own, at = highest:match('^(%d+) (%d+)$')
    if tonumber(own) > left then
      put_units(stack, at, own - left)
      left = 0
    else
      left = left - own
    end
  end
  return units - left
end

-- Return the account of a tenant, with levels of the time `now`. The script saves it at its end.
local function account_at(tenant, now)
  if accounts[tenant] then return accounts[tenant] end
  local found = redis.call('HMGET', account_key(tenant), unpack(FIELDS))
  local account = { tenant = tenant }
  for index, field in ipairs(FIELDS) do account[field] = tonumber(found[index] or 0) end
  local elapsed = math.max(now - account.at, 0)
  for _, limit in ipairs(LIMITS) do
    local level, stack = account[limit], stack_key(limit, tenant)
    local drained = math.min(level, elapsed * account[limit .. '_rate'])
    if level > 0 and drained == level then
      redis.call('DEL', stack)
    else
      take(stack, '+inf', drained)
    end
    account[limit] = level - drained
  end
  account.at = account.at + elapsed
  accounts[tenant] = account
  return account
end

local function save_accounts()
  for tenant, account in pairs(accounts) do
    local values = {}
    for _, field in ipairs(FIELDS) do
      table.insert(values, field)
      table.insert(values, digits(account[field]))
    end
    redis.call('HSET', account_key(tenant), unpack(values))
  end
end

-- Use a quota from now on. What the tenant has used of a limit stays in use.
local function use(account, requests_rate, tokens_rate)
  for index, rate in ipairs({ requests_rate, tokens_rate }) do
    local limit = LIMITS[index]
    account[limit .. '_rate'] = tonumber(rate)
    if tonumber(rate) == 0 and account[limit] > 0 then
      redis.call('DEL', stack_key(limit, account.tenant))
      account[limit] = 0
    end
  end
end

-- Add units at the top of the stack of a limit.
local function add(account, limit, number, units)
  if units == 0 or account[limit .. '_rate'] == 0 then return end
  local stack = stack_key(limit, account.tenant)
  put_units(stack, digits(number), lift(stack, number, number) + units)
  account[limit] = account[limit] + units
end

-- Add the reservation of a request.
local function open(account, request, requests, tokens, expires)
  account.number = account.number + 1
  account.reserved = account.reserved + tokens
  add(account, 'requests', account.number, requests * UNITS)
  add(account, 'tokens', account.number, tokens * UNITS)
  local number = digits(account.number)
  redis.call('ZADD', open_key(account.tenant), number, number)
  local reservation = number .. ' ' .. requests .. ' ' .. tokens .. ' ' .. account.tenant
  redis.call('HSET', RESERVATIONS, request, reservation)
  redis.call('ZADD', ENDS, expires, request)
end

-- End a reservation in the stack of a limit, and release some of its units. The rest joins the
-- reservation above.
local function close(account, limit, number, released, above)
  local stack = stack_key(limit, account.tenant)
  local kept = lift(stack, number, number) - released
  account[limit] = account[limit] - released
  if kept < 0 then
    account[limit] = account[limit] - kept - take(stack, number, -kept)
  elseif kept > 0 then
    put_units(stack, above, lift(stack, above, above) + kept)
  end
end

-- End the reservation of a request, if it has one. Without `tokens`, charge it in full.
local function settle(request, now, used_tokens, used_requests)
  local reservation = redis.call('HGET', RESERVATIONS, request)
  if not reservation then return end
  redis.call('HDEL', RESERVATIONS, request)
  redis.call('ZREM', ENDS, request)
  local number, requests, tokens, tenant = reservation:match('^(%d+) (%d+) (%d+) (.*)$')
  local account = account_at(tenant, now)
  local used = tonumber(used_tokens or tokens)
  local excess = math.max(used - tokens, 0)
  local unused = tokens + excess - used
  account.reserved = account.reserved + excess
  account.settled = account.settled + used
  account.released = account.released + unused
  redis.call('ZREM', open_key(tenant), number)
  local above = redis.call('ZRANGEBYSCORE', open_key(tenant), number, '+inf', 'LIMIT', 0, 1)[1]
    or digits(account.number + 1)
  close(account, 'requests', number, (requests - (used_requests or requests)) * UNITS, above)
  close(account, 'tokens', number, unused * UNITS, above)
  add(account, 'tokens', account.number + 1, excess * UNITS)
end

-- Charge expired reservations in full. O(log reservations) for each
local function prune_quotas(now)
  local over = redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, MOST_PRUNED)
  for _, request in ipairs(over) do settle(request, now) end
end

-- Return the wait for a limit in us, or -1 if the amount never fits. The quotient is exact enough below
-- 2^53 units.
local function wait_us(level, amount, rate, burst)
  if amount > burst then return -1 end
  return math.ceil(math.max(level - (burst - amount) * UNITS, 0) / rate)
end

-- Reserve what a request may use of its tenant's quota. O(log reservations)
-- The arguments from ARGV[at] on: request, tenant, requests, tokens,
--       then for requests and for tokens: rate per minute (0 without a limit), burst
-- Returns nil if the request fits, otherwise the index of the limit (1 for requests, 2 for tokens)
-- and the wait in us, or -1 if the request never fits.
local function reserve_quota(now, ttl_us, at)
  local request, tenant, requests, tokens = unpack(ARGV, at, at + 3)
  local rates, bursts = { ARGV[at + 4], ARGV[at + 6] }, { ARGV[at + 5], ARGV[at + 7] }
  prune_quotas(now)
  local short, longest = nil, 0
  if redis.call('HEXISTS', RESERVATIONS, request) == 1 then -- a repeated call
    redis.call('ZADD', ENDS, now + ttl_us, request)
  else
    local account = account_at(tenant, now)
    use(account, rates[1], rates[2])
    for index, limit in ipairs(LIMITS) do
      local rate = tonumber(rates[index])
      if rate > 0 and longest >= 0 then
        local amount = tonumber(({ requests, tokens })[index])
        local wait = wait_us(account[limit], amount, rate, tonumber(bursts[index]))
        if wait < 0 or wait > longest then short, longest = index, wait end
      end
    end
    if not short then open(account, request, requests, tokens, now + ttl_us) end
  end
  save_accounts()
  return short, longest
end
