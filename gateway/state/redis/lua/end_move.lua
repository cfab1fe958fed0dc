-- Free the slots of workers that a move still has. O(workers)
-- ARGV: move, then the workers

for at = 2, #ARGV do
  if holding_move(ARGV[at]) == ARGV[1] then redis.call('HDEL', MOVES, ARGV[at]) end
end
