-- Replace what a gateway has counted in a period. O(1)
-- ARGV: gateway, period, counts, ttl in us

local key = POOL .. 'usage:' .. ARGV[2]
redis.call('HSET', key, ARGV[1], ARGV[3])
redis.call('PEXPIRE', key, math.ceil(ARGV[4] / 1000))
