-- Extend the reservations that a gateway holds, and restore lost reservations.
-- O(reservations given x log reservations)
-- ARGV: ttl in us, maximum age of a gateway's lease in us, the node, then for each reservation:
--       request, tenant, requests, tokens, requests per minute, tokens per minute (0 without a limit)
-- Returns the number of gateways, including the node.

local ttl_us, gateway_us, node = ARGV[1], ARGV[2], ARGV[3]
local now = now_us()
prune_quotas(now)
for at = 4, #ARGV, 6 do
  local request = ARGV[at]
  if redis.call('HEXISTS', RESERVATIONS, request) == 1 then
    redis.call('ZADD', ENDS, now + ttl_us, request)
  else
    local account = account_at(ARGV[at + 1], now)
    use(account, ARGV[at + 4], ARGV[at + 5])
    open(account, request, ARGV[at + 2], ARGV[at + 3], now + ttl_us)
  end
end
save_accounts()
return count_gateways(node, now - gateway_us)
