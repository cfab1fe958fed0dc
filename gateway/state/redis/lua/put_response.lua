-- Store a response. O(log responses) for each response that ends or is displaced
-- ARGV: tenant, response, value, lifetime, bytes of all responses of the pool
-- Returns whether the response has a place, and the number of other responses that it displaced.

local tenant, response, value, lifetime, capacity = unpack(ARGV)
local now, bytes = now_us(), #value
lifetime, capacity = tonumber(lifetime), tonumber(capacity)

prune(now)
drop(response)
if bytes > capacity then return {0, 0} end

local life_ms = math.ceil(lifetime / 1000)
local own = tenant_key(tenant)
redis.call('SET', value_key(response), value, 'PX', life_ms)
redis.call('HSET', OWNERS, response, bytes .. ' ' .. tenant)
redis.call('ZADD', ENDS, now + lifetime, response)
redis.call('ZADD', own, now + lifetime, response)
redis.call('ZINCRBY', SIZES, bytes, tenant)
redis.call('INCRBY', TOTAL, bytes)

-- All entries of the index have ended by then. Without gateways, nothing else would remove them.
for _, key in ipairs({OWNERS, ENDS, SIZES, TOTAL, own}) do
  if redis.call('PTTL', key) < life_ms then redis.call('PEXPIRE', key, life_ms) end
end

local displaced = 0
while tonumber(redis.call('GET', TOTAL)) > capacity do
  local largest = redis.call('ZREVRANGE', SIZES, 0, 0)[1]
  -- A tenant's own set has expired if all of its responses have ended. They are the first to go.
  local oldest = redis.call('ZRANGE', tenant_key(largest), 0, 0)[1]
  oldest = oldest or redis.call('ZRANGE', ENDS, 0, 0)[1]
  drop(oldest)
  if oldest ~= response then displaced = displaced + 1 end
end
return {redis.call('HEXISTS', OWNERS, response), displaced}
