-- no-transaction
create index concurrently turns_of_erased_user on turns (tenant_id, erased_user_id, id) where erased_user_id is not null;
