-- Lease tokens of the best of the offered workers to a request.
-- O(offers x (log workers + log leases) + leases above the watermarks + log reservations)
-- ARGV: request, tokens, ttl in us, staleness in us, number of offers,
--       then for each offer: worker, epoch, watermark, score, score per token,
--       then the arguments of `reserve_quota`, if the request reserves quota first
-- Returns {'leased', index of the offer from 0, number, tokens above its watermark},
-- {'refused', reason} or {'short', index of the limit, wait} (see `reserve_quota`).

local request, tokens, ttl_us, stale_us = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local FIRST, FIELDS = 6, 5
local LAST = FIRST + FIELDS * ARGV[5] - 1
local RANK = { full = 1, stale = 2, unknown = 3, fenced = 4, gone = 5 } -- of `Refusal`

local now = now_us()
if #ARGV > LAST then
  local short, wait = reserve_quota(now, ttl_us, LAST + 1)
  if short then return { 'short', short, wait } end
end
prune(now)
drop(LEASE, request)
local claims = redis.call('EXISTS', CLAIM.held) == 1

-- Return whether another request has the first claim on the worker. O(log claims)
local function is_claimed(worker)
  local first = claims and redis.call('ZRANGE', CLAIM.worker .. worker, 0, 0)[1]
  return first and first:match('^%d+ (.*)$') ~= request
end

local function refusal(worker, epoch)
  local why, capacity = unusable(worker, epoch, now, stale_us)
  if why then return why end
  if is_claimed(worker) then return 'full' end
  local leased = tokens_of(LEASE, worker)
  if capacity > 0 and leased > 0 and leased + tokens > capacity then return 'full' end
end

local best, least, behind_best, why = nil, nil, nil, 'unknown'
for at = FIRST, LAST, FIELDS do
  local worker, epoch, watermark = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local refused = refusal(worker, epoch)
  if not refused then
    local leased = tokens_above(worker, watermark)
    local score = ARGV[at + 3] + ARGV[at + 4] * leased
    if not best or score < least then best, least, behind_best = at, score, leased end
  elseif at == FIRST or RANK[refused] < RANK[why] then
    why = refused
  end
end
if not best then return { 'refused', why } end

local number = next_number(now)
put(LEASE, request, ARGV[best], tokens, number, now + ttl_us)
if claims then drop(CLAIM, request) end
return { 'leased', (best - FIRST) / FIELDS, tonumber(number), behind_best }
