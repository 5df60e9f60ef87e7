-- The ids that clients gave to sessions that are deleted: never given again. Only a hash of namespace
-- and id is kept, since the id is something a client wrote.
create table spent_session_ids (
  tenant_id  uuid  not null constraint spent_session_ids_tenant_fkey references tenants (id),
  digest     bytea not null constraint spent_session_ids_digest_length check (octet_length(digest) = 32),
  constraint spent_session_ids_pkey primary key (tenant_id, digest)
);
select install_tenant_policy('spent_session_ids');
grant select, insert on spent_session_ids to throughline_service;
