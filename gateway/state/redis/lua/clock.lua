-- The store's time: the server's, in microseconds. (Tests put another function in this place.)
local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
