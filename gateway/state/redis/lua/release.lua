-- End the leases and claims of requests. O(requests x log leases)
-- ARGV: requests

for _, request in ipairs(ARGV) do
  drop(LEASE, request)
  drop(CLAIM, request)
end
