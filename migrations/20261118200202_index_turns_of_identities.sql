-- no-transaction
-- A batch takes the next turns of an identity in order, however many there are: without the id they are all sorted
-- each time.
create index concurrently turns_of_identity_in_order on turns (tenant_id, identity_id, id) where identity_id is not null;
