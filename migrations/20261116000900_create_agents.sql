-- A tenant's named assistants. The spec is the document the tenant wrote, checked by the service; the
-- upstream's key is apart, sealed for this row, and never returned.
create table agents (
  tenant_id    uuid        not null constraint agents_tenant_fkey references tenants (id),
  name         text        not null constraint agents_name_length check (char_length(name) between 1 and 64),
  spec         jsonb       not null,
  api_key_enc  bytea,
  created_at   timestamptz not null,
  updated_at   timestamptz not null,
  constraint agents_pkey primary key (tenant_id, name)
);
select install_tenant_policy('agents');
grant select, insert, update, delete on agents to throughline_service;
