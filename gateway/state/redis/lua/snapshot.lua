-- Return all workers with a recent report. O(workers x log leases + leases above the watermarks)
-- ARGV: maximum age of a worker's report, of a node's renewal and of a gateway's lease, in us, and the
--       node that asks
-- Returns {nodes, gateways, then for each worker: report, age in us, leased tokens, leased tokens above its
-- watermark, claimed tokens}.

local forget_us, stale_us, gateway_us, node = unpack(ARGV)
local now = now_us()
prune(now)
redis.call('ZREMRANGEBYSCORE', HEARD, '-inf', now - forget_us)
redis.call('ZREMRANGEBYSCORE', NODES, '-inf', '(' .. digits(now - stale_us))
redis.call('ZREMRANGEBYSCORE', GATEWAYS, '-inf', '(' .. digits(now - gateway_us))

local found = { redis.call('ZCARD', NODES), count_gateways(node, now - gateway_us) }
local heard = redis.call('ZRANGE', HEARD, 0, -1, 'WITHSCORES')
for at = 1, #heard, 2 do
  local worker = heard[at]
  local known = redis.call('HMGET', worker_key(worker), 'report', 'watermark')
  if known[1] then
    table.insert(found, known[1])
    table.insert(found, now - heard[at + 1])
    table.insert(found, tokens_of(LEASE, worker))
    table.insert(found, tokens_above(worker, known[2]))
    table.insert(found, tokens_of(CLAIM, worker))
  end
end
return found
