-- Extend the reservations that a gateway holds, and restore lost reservations.
-- O(reservations given x log reservations)
-- ARGV: ttl in us, maximum age of a node's last call in us, the node, then for each reservation:
--       request, tenant, requests, tokens, requests per minute, tokens per minute (0 without a limit)
-- Returns the number of nodes that call this script, including the node. They are the nodes with quotas.

-- Sorted set: node with quotas -> time of its last call.
local QUOTA_NODES = POOL .. 'quota-nodes'

local ttl_us, recent_us, node = ARGV[1], ARGV[2], ARGV[3]
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
redis.call('ZADD', QUOTA_NODES, now, node)
redis.call('ZREMRANGEBYSCORE', QUOTA_NODES, '-inf', '(' .. digits(now - recent_us))
return redis.call('ZCARD', QUOTA_NODES)
