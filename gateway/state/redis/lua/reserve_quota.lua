-- Reserve what a request may use of its tenant's quota. O(log reservations)
-- ARGV: ttl in us, request, tenant, requests, tokens,
--       then for requests and for tokens: rate per minute (0 without a limit), burst
-- Returns nothing if the request fits, otherwise the index of the limit (1 for requests, 2 for tokens)
-- and the wait in us, or -1 if the request never fits.

local ttl_us, request, tenant, requests, tokens = unpack(ARGV)
local rates, bursts = { ARGV[6], ARGV[8] }, { ARGV[7], ARGV[9] }

-- Return the wait for a limit in us. The quotient is exact enough below 2^53 units.
local function wait_us(level, amount, rate, burst)
  if amount > burst then return -1 end
  return math.ceil(math.max(level - (burst - amount) * UNITS, 0) / rate)
end

local now = now_us()
prune(now)
if redis.call('HEXISTS', RESERVATIONS, request) == 1 then -- a repeated call
  redis.call('ZADD', ENDS, now + ttl_us, request)
  save_accounts()
  return {}
end

local account = account_at(tenant, now)
use(account, rates[1], rates[2])
local short, longest = nil, 0
for index, limit in ipairs(LIMITS) do
  if tonumber(rates[index]) > 0 and longest >= 0 then
    local amount = tonumber(ARGV[index + 3])
    local wait = wait_us(account[limit], amount, tonumber(rates[index]), tonumber(bursts[index]))
    if wait < 0 or wait > longest then short, longest = index, wait end
  end
end
if not short then open(account, request, requests, tokens, now + ttl_us) end
save_accounts()
return short and { short, longest } or {}
