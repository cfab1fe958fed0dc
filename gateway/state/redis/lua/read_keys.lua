-- Return the revision of the keys, and the keys unless it is the given one. O(1)
-- ARGV: revision that the gateway knows

local found = redis.call('HMGET', POOL .. 'keys', 'revision', 'keys')
if found[1] == ARGV[1] then found[2] = false end
return found
