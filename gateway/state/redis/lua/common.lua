-- What the scripts share: it stands in front of each of them, behind the clock and
-- FORGET_MS (gateway/state/redis/scripts.py).
--
-- KEYS[1] is 'draftgate:{POOL}:'. All keys of a pool begin with it; its braces put them into one
-- slot, so that scripts may make their names, in a Cluster too. Instants and numbers of leases are
-- microseconds, whole numbers far below 2^53, which a Lua number holds exactly.

local POOL = KEYS[1]
local HEARD = POOL .. 'hb'        -- sorted set: worker -> instant of its last report
local LEASES = POOL .. 'leases'   -- hash: request -> 'NUMBER TOKENS WORKER'
local EXPIRY = POOL .. 'expiry'   -- sorted set: request -> instant at which its lease ends
local LEASED = POOL .. 'leased'   -- hash: worker -> tokens of its leases, 0 left out
local NUMBER = POOL .. 'number'   -- string: the last number of a lease
local GATEWAYS = POOL .. 'gateways' -- sorted set: gateway -> instant of its last renewal

-- Leases that one call ends, which takes 2.7 ms (Redis 6.2, Zen 4, 2026-11-22); the next goes on.
local MOST_PRUNED = 1000

-- Hash of a worker: epoch, seq, capacity_tokens, watermark, report.
local function worker_key(worker) return POOL .. 'w:' .. worker end

-- Sorted set of its leases: 'TOKENS REQUEST' -> number.
local function lease_key(worker) return POOL .. 'lease:' .. worker end

local function digits(number) return ('%.0f'):format(number) end

-- Write the lease of a request that has none. O(log leases)
local function put(request, worker, tokens, number, expires)
  redis.call('HSET', LEASES, request, number .. ' ' .. tokens .. ' ' .. worker)
  redis.call('ZADD', EXPIRY, expires, request)
  redis.call('ZADD', lease_key(worker), number, tokens .. ' ' .. request)
  redis.call('HINCRBY', LEASED, worker, tokens)
end

-- End the lease of a request, if it has one. O(log leases)
local function drop(request)
  local held = redis.call('HGET', LEASES, request)
  if not held then return end
  local tokens, worker = held:match('^%d+ (%d+) (.*)$')
  redis.call('HDEL', LEASES, request)
  redis.call('ZREM', EXPIRY, request)
  redis.call('ZREM', lease_key(worker), tokens .. ' ' .. request)
  if redis.call('HINCRBY', LEASED, worker, -tokens) == 0 then
    redis.call('HDEL', LEASED, worker)
  end
end

-- End what has expired. O(log leases) for each
local function prune(now)
  local over = redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now, 'LIMIT', 0, MOST_PRUNED)
  for _, request in ipairs(over) do drop(request) end
end

-- Return the tokens leased to a worker behind a number. O(log leases + those behind)
local function behind(worker, number)
  local tokens = 0
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', lease_key(worker), '(' .. number, '+inf')) do
    tokens = tokens + lease:match('^%d+')
  end
  return tokens
end

-- Return whether an epoch of a worker is in force, that is, no newer one is known. A newer one than
-- was known begins: the leases of the older end, its report is forgotten. O(1), else O(its leases)
local function enter(worker, epoch)
  local key = worker_key(worker)
  local known = redis.call('HGET', key, 'epoch')
  if known and known > epoch then return false end
  if known ~= epoch then
    for _, lease in ipairs(redis.call('ZRANGE', lease_key(worker), 0, -1)) do
      drop(lease:match('^%d+ (.*)$'))
    end
    redis.call('DEL', key)
    redis.call('ZREM', HEARD, worker)
    redis.call('HSET', key, 'epoch', epoch)
  end
  redis.call('PEXPIRE', key, FORGET_MS)
  return true
end

-- Return whether a report of an epoch that is in force is newer than the last; remember it as such.
local function follows(worker, seq)
  local last = redis.call('HGET', worker_key(worker), 'seq')
  if last and tonumber(seq) <= tonumber(last) then return false end
  redis.call('HSET', worker_key(worker), 'seq', seq)
  return true
end

-- Return the last number that a lease had, or that somebody says one had.
local function last_number()
  return tonumber(redis.call('GET', NUMBER) or 0)
end

-- Let numbers of leases go on behind one that somebody knows: after a loss of memory they would
-- lie below the watermarks of workers.
local function go_on_behind(number)
  if tonumber(number) > last_number() then redis.call('SET', NUMBER, number) end
end
