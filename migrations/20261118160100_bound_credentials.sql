-- Behind a long statement everybody else would wait too: then this fails, and may be run again.
set local lock_timeout = '5s';

-- How many keys a tenant has that were not revoked, and whether another admin key is among them, is asked while the
-- tenant's row is held: it must cost as much as there are such keys, however many were revoked before.
create index api_keys_unrevoked on api_keys (tenant_id, id) where revoked_at is null;

-- What a node runs, for operators; null from nodes that are older than this.
alter table nodes add column version text;
