-- Claims up to ARGV[2] from the rest of the limit ARGV[1] in the window KEYS[1], and returns the claimed amount
-- and the used part of the window. The used part never passes the limit.
local used = tonumber(redis.call('GET', KEYS[1]) or '0')
local granted = math.min(tonumber(ARGV[2]), tonumber(ARGV[1]) - used)
if granted <= 0 then
  return {0, used}
end
redis.call('INCRBY', KEYS[1], granted)
redis.call('EXPIRE', KEYS[1], ARGV[3])
return {granted, used + granted}
