-- Return the value of a response of a tenant, or nil. O(log responses)
-- ARGV: tenant, response

local tenant, response = unpack(ARGV)
if not exists(tenant, response) then return false end
return redis.call('GET', value_key(response))
