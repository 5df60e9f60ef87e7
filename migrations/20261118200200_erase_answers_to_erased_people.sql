-- What the agent answered to an erased person in a conversation of others is erased with what they said there. It is
-- found by their turns: a first look blanks messages and turns, and a second one, when nothing of before can be under
-- way any more, blanks the copies that were being made meanwhile. The indexes follow, each by itself: both tables are
-- large, and are written meanwhile.
--
--   erased_user_id  whose turn it was, between the two looks
set local lock_timeout = '5s';

alter table turns add column erased_user_id uuid;
