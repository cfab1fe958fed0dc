-- Helpers of the scripts for flows. The client puts them in front of each script, after pool.lua. The
-- memory store in gateway/state/memory/flows.py defines what the scripts do.

-- Maximum flows that one call ends because of their age, to bound the time of the call.
local MOST_ENDED = 100

-- Hash of a flow: life, begun, deadline, hops, and of each hop N:
-- kN: its kind, bN: its arrival after begun, eN: its end after begun, lN: its lengths
local function flow_key(flow) return POOL .. 'flow:' .. flow end

-- Sorted set of a tenant: flow -> time at which it is forgotten.
local function tenant_key(tenant) return POOL .. 'flows:' .. tenant end

-- Forget a flow. O(log flows)
local function drop(tenant, flow)
  redis.call('DEL', flow_key(flow))
  redis.call('ZREM', tenant_key(tenant), flow)
end

-- Forget a tenant's flows that have expired. O(log flows) for each
local function prune(tenant, now)
  local over = redis.call('ZRANGEBYSCORE', tenant_key(tenant), '-inf', now, 'LIMIT', 0, MOST_ENDED)
  for _, flow in ipairs(over) do drop(tenant, flow) end
end

-- Return whether a tenant's flow exists and has not expired.
local function exists(tenant, flow, now)
  local ends = redis.call('ZSCORE', tenant_key(tenant), flow)
  return ends and tonumber(ends) > now and redis.call('EXISTS', flow_key(flow)) == 1
end

-- Return whether a tenant's flow exists in this life.
local function lives(tenant, flow, life)
  return exists(tenant, flow, now_us()) and redis.call('HGET', flow_key(flow), 'life') == life
end
