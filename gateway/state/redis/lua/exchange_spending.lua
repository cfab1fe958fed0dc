-- Keep the totals that a gateway has charged, and return the sums of all gateways. O(gateways)
-- ARGV: gateway, then for each account: name, total in billionths of a USD, ttl in us

local source, sums = ARGV[1], {}
for at = 2, #ARGV, 3 do
  local key = POOL .. 'spent:' .. ARGV[at]
  local before = tonumber(redis.call('HGET', key, source) or 0)
  if tonumber(ARGV[at + 1]) > before then redis.call('HSET', key, source, ARGV[at + 1]) end
  redis.call('PEXPIRE', key, math.ceil(ARGV[at + 2] / 1000))
  local sum = 0
  for _, total in ipairs(redis.call('HVALS', key)) do sum = sum + tonumber(total) end
  sums[#sums + 1] = sum
end
return sums
