-- Extend the leases that a gateway holds, and restore lost leases.
-- O(leases given x log leases)
-- ARGV: node, ttl in us, 1 if the node had a lease since its last renewal, then for each lease: request, worker, epoch, tokens, number
-- Returns the requests whose worker has a newer epoch.

local node, ttl_us = ARGV[1], ARGV[2]
local now = now_us()
prune(now)
redis.call('ZADD', NODES, now, node)
if ARGV[3] == '1' then redis.call('ZADD', GATEWAYS, now, node) end

local fenced = {}
local entered = {} -- worker -> its current epoch, read once
for at = 4, #ARGV, 5 do
  local request, worker, epoch = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local tokens, number = ARGV[at + 3], ARGV[at + 4]
  if entered[worker] ~= epoch and enter(worker, epoch) then entered[worker] = epoch end
  if entered[worker] ~= epoch then
    table.insert(fenced, request)
  elseif redis.call('HGET', LEASE.held, request) == number .. ' ' .. tokens .. ' ' .. worker then
    redis.call('ZADD', LEASE.expiry, now + ttl_us, request)
  else
    drop(LEASE, request)
    drop(CLAIM, request)
    put(LEASE, request, worker, tokens, number, now + ttl_us)
    continue_above(number)
  end
end
return fenced
