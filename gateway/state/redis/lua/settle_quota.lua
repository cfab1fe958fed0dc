-- End reservations and charge what their requests have used. O(requests x log reservations)
-- ARGV: for each request: request, used tokens, used requests

local now = now_us()
prune_quotas(now)
for at = 1, #ARGV, 3 do settle(ARGV[at], now, ARGV[at + 1], ARGV[at + 2]) end
save_accounts()
