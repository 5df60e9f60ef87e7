-- Takes up to ARGV[2] from what is left of the limit ARGV[1] in the window that KEYS[1] names, and
-- answers how much was taken and how much of the window is used. What is taken never passes the limit.
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
local taken = math.min(tonumber(ARGV[2]), tonumber(ARGV[1]) - used)
if taken <= 0 then
  return {0, used}
end
redis.call('INCRBY', KEYS[1], taken)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {taken, used + taken}
