-- Record that the response of a hop has ended. O(1)
-- ARGV: tenant, flow, life, number of the hop, its lengths

local tenant, flow, life, number, lengths = unpack(ARGV)
if not lives(tenant, flow, life) then return end
local key = flow_key(flow)
local ended = now_us() - redis.call('HGET', key, 'begun')
redis.call('HSET', key, 'e' .. number, digits(ended), 'l' .. number, lengths)
