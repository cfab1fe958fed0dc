-- The time of the store in microseconds, from the server's clock. Tests replace this file.
local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
