-- Claim the next room of one of the offered workers for a request, or renew its claim.
-- O(offers x log workers + log claims)
-- ARGV: request, tokens, ttl in us, staleness in us, then for each offer: worker, epoch
-- Returns {index of the offer from 0, number of the claim}, or false.

local request, tokens, ttl_us, stale_us = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local now = now_us()
prune(now)

local number, _, held = holding(CLAIM, request)
drop(CLAIM, request)
if holding(LEASE, request) then return false end

local FIRST, FIELDS = 5, 2
local best, least = nil, nil
for at = FIRST, #ARGV, FIELDS do
  local worker, epoch = ARGV[at], ARGV[at + 1]
  local why, capacity = unusable(worker, epoch, now, stale_us)
  if not why and tokens <= capacity then
    local taken = tokens_of(LEASE, worker) + tokens_of(CLAIM, worker)
    local missing = math.max(0, taken + tokens - capacity)
    if worker == held then missing = -1 end -- the claim stays
    if not best or missing < least then best, least = at, missing end
  end
end
if not best then return false end

number = number or next_number(now)
put(CLAIM, request, ARGV[best], ARGV[2], number, now + ttl_us)
return { (best - FIRST) / FIELDS, tonumber(number) }
