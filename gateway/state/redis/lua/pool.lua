-- Helpers of the scripts for leases and quotas. The client puts them in front of each script, after
-- the clock (gateway/state/redis/scripts.py).
--
-- KEYS[1] is 'draftgate:{POOL}:', the prefix of all keys of a pool. Its braces put the keys into one
-- slot, so that scripts may build key names, even in a Redis Cluster. Times are microseconds, which
-- are far below 2^53, so a Lua number represents them exactly.

local POOL = KEYS[1]
local NODES = POOL .. 'nodes'       -- sorted set: node -> time of its last renewal
local GATEWAYS = POOL .. 'gateways' -- sorted set: node -> time at which it last had a lease

-- Maximum leases, claims or reservations that one call ends because of their age. To end 1,000 leases
-- takes 2.7 ms (Redis 6.2, AMD Zen 4, 2026-11-22).
local MOST_PRUNED = 1000

-- Return the number of gateways, of which the caller is one. O(log gateways)
local function count_gateways(caller, since)
  local had = redis.call('ZSCORE', GATEWAYS, caller)
  local others = redis.call('ZCOUNT', GATEWAYS, since, '+inf')
  if had and tonumber(had) >= since then others = others - 1 end
  return others + 1
end

local function digits(number) return ('%.0f'):format(number) end
