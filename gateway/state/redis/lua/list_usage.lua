-- Return what the gateways have counted in a period. O(gateways)
-- ARGV: period

return redis.call('HVALS', POOL .. 'usage:' .. ARGV[1])
