-- End the leases of requests. O(requests x log leases)
-- ARGV: requests

for _, request in ipairs(ARGV) do drop(request) end
