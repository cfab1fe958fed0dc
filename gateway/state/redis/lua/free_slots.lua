-- Free those slots that a holder still has. O(slots)
-- ARGV: holder, then the slots

for at = 2, #ARGV do
  if slot_holder(ARGV[at]) == ARGV[1] then redis.call('HDEL', SLOTS, ARGV[at]) end
end
