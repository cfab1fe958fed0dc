-- Take the move slots of workers for a move, all of them or none. O(workers)
-- ARGV: move, ttl in us, then the workers
-- Returns 1 if the move has the slots, or 0.

local move, now = ARGV[1], now_us()
for at = 3, #ARGV do
  local held, ends = holding_move(ARGV[at])
  if held and held ~= move and tonumber(ends) > now then return 0 end
end
local ends = digits(now + ARGV[2])
for at = 3, #ARGV do
  redis.call('HSET', MOVES, ARGV[at], ends .. ' ' .. move)
end
redis.call('PEXPIRE', MOVES, FORGET_MS)
return 1
