-- Return the tokens that a tenant has reserved, settled and released. O(1)
-- ARGV: tenant

prune_quotas(now_us())
save_accounts()
local found = redis.call('HMGET', account_key(ARGV[1]), 'reserved', 'settled', 'released')
return { tonumber(found[1] or 0), tonumber(found[2] or 0), tonumber(found[3] or 0) }
