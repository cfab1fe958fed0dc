-- Remove a worker from the pool, but keep its leases. O(log workers)
-- ARGV: worker, epoch, seq

local worker, epoch, seq = unpack(ARGV)
if enter(worker, epoch) and follows(worker, seq) then
  redis.call('HDEL', worker_key(worker), 'capacity_tokens', 'watermark', 'report')
  redis.call('ZREM', HEARD, worker)
end
