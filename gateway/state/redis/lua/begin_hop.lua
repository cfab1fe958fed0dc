-- Add a hop to a flow, or begin a flow with its first hop. O(log flows)
-- ARGV: tenant, flow, kind, us since the arrival, deadline of the flow in us or -1, us for which a
-- flow is kept after its deadline, maximum flows of a tenant, maximum hops of a flow
-- Returns the number of the hop, the age and the deadline of the flow in us, and its life, or nil
-- for an ordinary request.

local tenant, flow, kind, ago, deadline, keep, most_flows, most_hops = unpack(ARGV)
local now, key, own = now_us(), flow_key(ARGV[2]), tenant_key(ARGV[1])
local arrived = now - ago

prune(tenant, now)
if not exists(tenant, flow, now) then
  deadline = tonumber(deadline)
  if deadline < 0 or redis.call('ZCARD', own) >= tonumber(most_flows) then return nil end
  local ends = arrived + deadline + keep
  redis.call('DEL', key)
  redis.call('HSET', key, 'life', digits(now), 'begun', digits(arrived), 'deadline', digits(deadline),
    'hops', 0)
  redis.call('ZADD', own, digits(ends), flow)
  local life_ms = math.max(1, math.ceil((ends - now) / 1000))
  redis.call('PEXPIRE', key, life_ms)
  if redis.call('PTTL', own) < life_ms then redis.call('PEXPIRE', own, life_ms) end
end

local life, begun, of_flow, hops = unpack(
  redis.call('HMGET', key, 'life', 'begun', 'deadline', 'hops'))
if tonumber(hops) >= tonumber(most_hops) then return nil end
local number = redis.call('HINCRBY', key, 'hops', 1)
redis.call('HSET', key, 'k' .. number, kind, 'b' .. number, digits(math.max(arrived - begun, 0)))
return {number, now - begun, tonumber(of_flow), tonumber(life)}
