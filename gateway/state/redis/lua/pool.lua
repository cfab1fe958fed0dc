-- Helpers of the scripts for leases and quotas. The client puts them in front of each script, after
-- the clock (gateway/state/redis/scripts.py).
--
-- KEYS[1] is 'draftgate:{POOL}:', the prefix of all keys of a pool. Its braces put the keys into one
-- slot, so that scripts may build key names, even in a Redis Cluster. Times are microseconds, which
-- are far below 2^53, so a Lua number represents them exactly.

local POOL = KEYS[1]
local GATEWAYS = POOL .. 'gateways' -- sorted set: gateway -> time of its last renewal

-- Maximum leases, claims or reservations that one call ends because of their age. To end 1,000 leases
-- takes 2.7 ms (Redis 6.2, AMD Zen 4, 2026-11-22).
local MOST_PRUNED = 1000

local function digits(number) return ('%.0f'):format(number) end
