-- no-transaction
-- Messages of a turn that have no place in it: copies, above all. The others are in messages_one_row_per_step.
create index concurrently messages_of_turn on messages (tenant_id, turn_id) where turn_id is not null and step is null;
