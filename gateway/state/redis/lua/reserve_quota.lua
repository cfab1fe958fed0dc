-- Reserve what a request may use of its tenant's quota. O(log reservations)
-- ARGV: ttl in us, then the arguments of `reserve_quota`
-- Returns nothing if the request fits, otherwise the index of the limit and the wait, as
-- `reserve_quota` does.

local short, wait = reserve_quota(now_us(), ARGV[1], 2)
return short and { short, wait } or {}
