-- End a flow and return its hops. O(hops + log flows)
-- ARGV: tenant, flow, life
-- Returns for each hop its kind, its arrival and its end in us after the begin of the flow, and its
-- lengths, or nil for an unknown flow. The end of a hop without an end is -1.

local tenant, flow, life = unpack(ARGV)
if not lives(tenant, flow, life) then return nil end
local key, found = flow_key(flow), {}
for number = 1, tonumber(redis.call('HGET', key, 'hops')) do
  local kind, begun, ended, lengths = unpack(
    redis.call('HMGET', key, 'k' .. number, 'b' .. number, 'e' .. number, 'l' .. number))
  found[#found + 1] = kind
  found[#found + 1] = tonumber(begun)
  found[#found + 1] = tonumber(ended or -1)
  found[#found + 1] = lengths or ''
end
drop(tenant, flow)
return found
