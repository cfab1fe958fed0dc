-- Return the units of requests and of tokens that a tenant uses now. O(log reservations)
-- ARGV: tenant

local now = now_us()
prune_quotas(now)
local account = account_at(ARGV[1], now)
save_accounts()
return { digits(account.requests), digits(account.tokens) }
