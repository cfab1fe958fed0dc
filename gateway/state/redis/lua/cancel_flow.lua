-- End a flow whose first hop was refused, unless another hop has arrived. O(log flows)
-- ARGV: tenant, flow, life
-- Returns 1 if the flow has ended, or 0.

local tenant, flow, life = unpack(ARGV)
if not lives(tenant, flow, life) then return 0 end
if tonumber(redis.call('HGET', flow_key(flow), 'hops')) > 1 then return 0 end
drop(tenant, flow)
return 1
