-- Delete a response of a tenant. O(log responses)
-- ARGV: tenant, response
-- Returns 1, or 0 if the tenant has no such response.

local tenant, response = unpack(ARGV)
if not exists(tenant, response) then return 0 end
drop(response)
return 1
