-- Helpers of all scripts. The client puts them in front of each script, after the clock and
-- FORGET_MS (gateway/state/redis/store.py).
--
-- KEYS[1] is 'draftgate:{POOL}:', the prefix of all keys of a pool. Its braces put the keys into one
-- slot, so that scripts may build key names, even in a Redis Cluster. Times and lease numbers are
-- microseconds. These integers are far below 2^53, so a Lua number represents them exactly.

local POOL = KEYS[1]
local HEARD = POOL .. 'hb'        -- sorted set: worker -> time of its last report
local LEASES = POOL .. 'leases'   -- hash: request -> 'NUMBER TOKENS WORKER'
local EXPIRY = POOL .. 'expiry'   -- sorted set: request -> time at which its lease ends
local LEASED = POOL .. 'leased'   -- hash: worker -> tokens of its leases, without zeros
local NUMBER = POOL .. 'number'   -- string: the highest lease number
local GATEWAYS = POOL .. 'gateways' -- sorted set: gateway -> time of its last renewal

-- Maximum leases that one call ends, which takes 2.7 ms (Redis 6.2, AMD Zen 4, 2026-11-22).
local MOST_PRUNED = 1000

-- Hash of a worker: epoch, seq, capacity_tokens, watermark, report.
local function worker_key(worker) return POOL .. 'w:' .. worker end

-- Sorted set of its leases: 'TOKENS REQUEST' -> number.
local function lease_key(worker) return POOL .. 'lease:' .. worker end

local function digits(number) return ('%.0f'):format(number) end

-- Add the lease of a request that has none. O(log leases)
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

-- End expired leases. O(log leases) for each
local function prune(now)
  local over = redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now, 'LIMIT', 0, MOST_PRUNED)
  for _, request in ipairs(over) do drop(request) end
end

-- Return the tokens of a worker's leases above a number. O(log leases + leases above it)
local function tokens_above(worker, number)
  local tokens = 0
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', lease_key(worker), '(' .. number, '+inf')) do
    tokens = tokens + lease:match('^%d+')
  end
  return tokens
end

-- Return whether no newer epoch of the worker is known. If the epoch itself is new, end the leases
-- of the older epoch and delete its report. O(1), or O(its leases) for a new epoch
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

-- Return whether a report of the current epoch is newer than the last report, and record its seq.
local function follows(worker, seq)
  local last = redis.call('HGET', worker_key(worker), 'seq')
  if last and tonumber(seq) <= tonumber(last) then return false end
  redis.call('HSET', worker_key(worker), 'seq', seq)
  return true
end

-- Return the highest known lease number.
local function last_number()
  return tonumber(redis.call('GET', NUMBER) or 0)
end

-- Continue lease numbers above a known number. Otherwise new numbers would be below the watermarks of
-- workers after the server has lost its memory.
local function continue_above(number)
  if tonumber(number) > last_number() then redis.call('SET', NUMBER, number) end
end
