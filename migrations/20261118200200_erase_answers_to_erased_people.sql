-- What the agent answered to an erased person in a conversation of others is erased with what they said there. It is
-- found by their turns: a first look blanks messages and turns, and a second one, when nothing of before can be under
-- way any more, blanks the copies that were being made meanwhile.
--
--   erased_user_id  whose turn it was, between the two looks
alter table turns add column erased_user_id uuid;
create index turns_of_erased_user on turns (tenant_id, erased_user_id, id) where erased_user_id is not null;

-- A batch takes the next turns of an identity in order, however many there are: without the id they are all sorted
-- each time.
create index turns_of_identity_in_order on turns (tenant_id, identity_id, id) where identity_id is not null;
drop index turns_of_identity;

-- Messages of a turn that have no place in it: copies, above all. The others are in messages_one_row_per_step.
create index messages_of_turn on messages (tenant_id, turn_id) where turn_id is not null and step is null;
