-- Replace the report of a worker. O(log workers), and O(its older leases) for a new epoch
-- ARGV: worker, epoch, seq, capacity in tokens, watermark, the report as JSON
-- Returns 1, or 0 for a report that is late or of an older epoch.

local worker, epoch, seq, capacity, watermark, report = unpack(ARGV)
if not enter(worker, epoch) or not follows(worker, seq) then return 0 end
redis.call('HSET', worker_key(worker),
  'capacity_tokens', capacity, 'watermark', watermark, 'report', report)
redis.call('ZADD', HEARD, now_us(), worker)
continue_above(watermark)
return 1
