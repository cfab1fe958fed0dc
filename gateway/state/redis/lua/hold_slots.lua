-- Take slots, all of them or none. O(slots)
-- ARGV: holder, ttl in us, then the slots
-- Returns 1 if the holder has the slots, or 0.

local holder, now = ARGV[1], now_us()
for at = 3, #ARGV do
  local held, ends = slot_holder(ARGV[at])
  if held and held ~= holder and tonumber(ends) > now then return 0 end
end
local ends = digits(now + ARGV[2])
for at = 3, #ARGV do
  redis.call('HSET', SLOTS, ARGV[at], ends .. ' ' .. holder)
end
redis.call('PEXPIRE', SLOTS, FORGET_MS)
return 1
