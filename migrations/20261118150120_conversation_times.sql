-- The time of the last write. Times within a conversation never run backwards, whichever node writes. In a
-- transaction of its own: whoever holds a conversation may wait for `turns`.
set local lock_timeout = '5s';

alter table conversations add column last_at timestamptz;
