-- Helpers of the scripts for stored responses. The client puts them in front of each script, after
-- the clock (gateway/state/redis/scripts.py). The memory store in gateway/state/memory/responses.py
-- defines what the scripts do.
--
-- KEYS[1] is 'draftgate:{POOL}:', the prefix of all keys of a pool. Times are microseconds.

local POOL = KEYS[1]
local OWNERS = POOL .. 'responses'       -- hash: response -> 'BYTES TENANT'
local ENDS = POOL .. 'response-ends'     -- sorted set: response -> time at which it ends
local SIZES = POOL .. 'response-bytes'   -- sorted set: tenant -> bytes of its responses, no zeros
local TOTAL = POOL .. 'response-total'   -- string: bytes of all responses

-- Maximum responses that one call ends because of their age, to bound the time of the call.
local MOST_PRUNED = 1000

-- String: the value of a response, which expires by itself.
local function value_key(response) return POOL .. 'response:' .. response end

-- Sorted set of a tenant: response -> time at which it ends.
local function tenant_key(tenant) return POOL .. 'responses:' .. tenant end

-- Return the bytes and the tenant of a response, or nothing for an unknown response.
local function owner(response)
  local found = redis.call('HGET', OWNERS, response)
  if found then return found:match('^(%d+) (.*)$') end
end

-- Drop a response, if it exists. O(log responses)
local function drop(response)
  local bytes, tenant = owner(response)
  if not bytes then return end
  redis.call('DEL', value_key(response))
  redis.call('HDEL', OWNERS, response)
  redis.call('ZREM', ENDS, response)
  redis.call('ZREM', tenant_key(tenant), response)
  redis.call('DECRBY', TOTAL, bytes)
  if tonumber(redis.call('ZINCRBY', SIZES, -bytes, tenant)) <= 0 then
    redis.call('ZREM', SIZES, tenant)
  end
end

-- Drop responses that have ended. O(log responses) for each
local function prune(now)
  local over = redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, MOST_PRUNED)
  for _, ended in ipairs(over) do drop(ended) end
end

-- Return whether a response of the tenant exists and has not ended.
local function exists(tenant, response)
  local _, of = owner(response)
  if of ~= tenant then return false end
  return tonumber(redis.call('ZSCORE', ENDS, response)) > now_us()
end
