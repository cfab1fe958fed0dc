-- Lease tokens of the best of the offered workers to a request.
-- O(offers x (log workers + log leases) + leases above the watermarks)
-- ARGV: request, tokens, ttl in us, staleness in us,
--       then for each offer: worker, epoch, watermark, score, score per token
-- Returns {1, index of the offer from 0, number, tokens above its watermark} or {0, reason}.

local request, tokens, ttl_us, stale_us = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local FIRST, FIELDS = 5, 5
local RANK = { full = 1, stale = 2, unknown = 3, fenced = 4, gone = 5 } -- of `Refusal`

local function refusal(worker, epoch, now)
  local known = redis.call('HMGET', worker_key(worker), 'epoch', 'seq', 'capacity_tokens')
  if not known[2] then return 'unknown' end
  if known[1] ~= epoch then return 'fenced' end
  if not known[3] then return 'gone' end
  local heard = redis.call('ZSCORE', HEARD, worker)
  if not heard or now - heard > tonumber(stale_us) then return 'stale' end
  local capacity = tonumber(known[3])
  local leased = tonumber(redis.call('HGET', LEASED, worker) or 0)
  if capacity > 0 and leased > 0 and leased + tokens > capacity then return 'full' end
end

local now = now_us()
prune(now)
drop(request)

local best, least, behind_best, why = nil, nil, nil, 'unknown'
for at = FIRST, #ARGV, FIELDS do
  local worker, epoch, watermark = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local refused = refusal(worker, epoch, now)
  if not refused then
    local leased = tokens_above(worker, watermark)
    local score = ARGV[at + 3] + ARGV[at + 4] * leased
    if not best or score < least then best, least, behind_best = at, score, leased end
  elseif at == FIRST or RANK[refused] < RANK[why] then
    why = refused
  end
end
if not best then return { 0, why } end

local number = math.max(last_number() + 1, now)
redis.call('SET', NUMBER, digits(number))
put(request, ARGV[best], tokens, digits(number), now + ttl_us)
return { 1, (best - FIRST) / FIELDS, number, behind_best }
