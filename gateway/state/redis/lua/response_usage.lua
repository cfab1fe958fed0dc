-- Return the number of responses of the pool and their bytes. O(log responses) for each that ends

prune(now_us())
return {redis.call('HLEN', OWNERS), tonumber(redis.call('GET', TOTAL) or 0)}
