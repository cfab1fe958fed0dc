-- The leases of requests end. O(requests x log leases)
-- ARGV: requests

for _, request in ipairs(ARGV) do drop(request) end
