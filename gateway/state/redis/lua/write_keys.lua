-- Replace the keys of a revision. O(1)
-- ARGV: expected revision, or an empty string without keys; new revision; keys
-- Returns whether the keys had the expected revision.

local key = POOL .. 'keys'
if (redis.call('HGET', key, 'revision') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', key, 'revision', ARGV[2], 'keys', ARGV[3])
return 1
