-- Helpers of the scripts for leases. The client puts them in front of each script, after pool.lua and
-- FORGET_MS (gateway/state/redis/store.py). Lease numbers are microseconds.

local HEARD = POOL .. 'hb'        -- sorted set: worker -> time of its last report
local NUMBER = POOL .. 'number'   -- string: the highest number of a lease or claim
local SLOTS = POOL .. 'moves'     -- hash: slot of a worker or a batch -> 'END HOLDER'
local EXPIRED_CLAIMS = POOL .. 'expired-worker-claims' -- string: the number of claims that expired

-- The keys of leases, and of claims, which have the same form.
-- held: hash: request -> 'NUMBER TOKENS WORKER'
-- expiry: sorted set: request -> time at which its lease ends
-- tokens: hash: worker -> tokens of its leases, without zeros
-- worker: the first part of each worker's sorted set: 'TOKENS REQUEST' -> number
local LEASE = {
  held = POOL .. 'leases', expiry = POOL .. 'expiry', tokens = POOL .. 'leased',
  worker = POOL .. 'lease:',
}
local CLAIM = {
  held = POOL .. 'worker-claims', expiry = POOL .. 'worker-claim-expiry',
  tokens = POOL .. 'claimed', worker = POOL .. 'worker-claim:',
}

-- Hash of a worker: epoch, seq, capacity_tokens, watermark, report.
local function worker_key(worker) return POOL .. 'w:' .. worker end

-- Add the lease or claim of a request that has none. O(log leases)
local function put(kind, request, worker, tokens, number, expires)
  redis.call('HSET', kind.held, request, number .. ' ' .. tokens .. ' ' .. worker)
  redis.call('ZADD', kind.expiry, expires, request)
  redis.call('ZADD', kind.worker .. worker, number, tokens .. ' ' .. request)
  redis.call('HINCRBY', kind.tokens, worker, tokens)
end

-- Return the number, tokens and worker of a request's lease or claim, or nil without one.
local function holding(kind, request)
  local held = redis.call('HGET', kind.held, request)
  if held then return held:match('^(%d+) (%d+) (.*)$') end
end

-- Return the holder of a slot and the end of the slot, or nil.
local function slot_holder(slot)
  local held = redis.call('HGET', SLOTS, slot)
  if held then
    local ends, holder = held:match('^(%d+) (.*)$')
    return holder, ends
  end
end

-- End the lease or claim of a request, if it has one. O(log leases)
local function drop(kind, request)
  local _, tokens, worker = holding(kind, request)
  if not worker then return end
  redis.call('HDEL', kind.held, request)
  redis.call('ZREM', kind.expiry, request)
  redis.call('ZREM', kind.worker .. worker, tokens .. ' ' .. request)
  if redis.call('HINCRBY', kind.tokens, worker, -tokens) <= 0 then -- below 0 after an eviction
    redis.call('HDEL', kind.tokens, worker)
  end
end

-- Forget all leases or claims if the server has evicted a key of them, since they could no longer be
-- ended. Their gateways restore them, as after a flush. O(1), or O(workers) after an eviction
local function forget_remains(kind)
  if redis.call('HLEN', kind.held) == redis.call('ZCARD', kind.expiry) then return end
  for _, worker in ipairs(redis.call('HKEYS', kind.tokens)) do
    redis.call('DEL', kind.worker .. worker)
  end
  for _, worker in ipairs(redis.call('ZRANGE', HEARD, 0, -1)) do
    redis.call('DEL', kind.worker .. worker)
  end
  redis.call('DEL', kind.held, kind.expiry, kind.tokens)
end

-- End expired leases and claims. O(log leases) for each
local function prune(now)
  for _, kind in ipairs({ LEASE, CLAIM }) do
    forget_remains(kind)
    local over = redis.call('ZRANGEBYSCORE', kind.expiry, '-inf', now, 'LIMIT', 0, MOST_PRUNED)
    for _, request in ipairs(over) do drop(kind, request) end
    if kind == CLAIM and #over > 0 then redis.call('INCRBY', EXPIRED_CLAIMS, #over) end
  end
end

-- Return the tokens of all leases, or of all claims, of a worker. O(1)
local function tokens_of(kind, worker)
  return tonumber(redis.call('HGET', kind.tokens, worker) or 0)
end

-- Return the tokens of a worker's leases above a number. O(log leases + leases above it)
local function tokens_above(worker, number)
  local tokens = 0
  for _, lease in ipairs(redis.call('ZRANGEBYSCORE', LEASE.worker .. worker, '(' .. number, '+inf')) do
    tokens = tokens + lease:match('^%d+')
  end
  return tokens
end

-- Return why an offered worker gets no leases at all, or nil for a live worker. The second value is
-- the capacity of a live worker, in tokens. O(log workers)
local function unusable(worker, epoch, now, stale_us)
  local known = redis.call('HMGET', worker_key(worker), 'epoch', 'seq', 'capacity_tokens')
  if not known[2] then return 'unknown' end
  if known[1] ~= epoch then return 'fenced' end
  if not known[3] then return 'gone' end
  local heard = redis.call('ZSCORE', HEARD, worker)
  if not heard or now - heard > tonumber(stale_us) then return 'stale' end
  return nil, tonumber(known[3])
end

-- Return whether no newer epoch of the worker is known. If the epoch itself is new, end the leases
-- and claims of the older epoch and delete its report. O(1), or O(its leases) for a new epoch
local function enter(worker, epoch)
  local key = worker_key(worker)
  local known = redis.call('HGET', key, 'epoch')
  if known and known > epoch then return false end
  if known ~= epoch then
    for _, kind in ipairs({ LEASE, CLAIM }) do
      for _, held in ipairs(redis.call('ZRANGE', kind.worker .. worker, 0, -1)) do
        drop(kind, held:match('^%d+ (.*)$'))
      end
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

-- Return the highest known number.
local function last_number()
  return tonumber(redis.call('GET', NUMBER) or 0)
end

-- Return a new number as digits, above all known numbers.
local function next_number(now)
  local number = digits(math.max(last_number() + 1, now))
  redis.call('SET', NUMBER, number)
  return number
end

-- Continue lease numbers above a known number. Otherwise new numbers would be below the watermarks of
-- workers after the server has lost its memory.
local function continue_above(number)
  if tonumber(number) > last_number() then redis.call('SET', NUMBER, number) end
end
