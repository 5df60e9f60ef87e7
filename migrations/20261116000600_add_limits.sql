-- What a tenant may use beyond or below the defaults: only what its operator changed is stored, so a
-- new default reaches everyone else. Unknown members are left alone: a newer node may know them.
alter table tenants
  add column limits jsonb not null default '{}'
  constraint tenants_limits_object check (jsonb_typeof(limits) = 'object');
grant update (limits) on tenants to throughline_service;

-- A key is looked up for nearly every request: it brings its tenant's limits along.
drop function find_api_key(uuid, uuid, bytea);
create function find_api_key(p_tenant_id uuid, p_id uuid, p_digest bytea)
returns table (
  tenant_id uuid, id uuid, scopes text[], platforms text[],
  expires_at timestamptz, revoked_at timestamptz, last_used_at timestamptz,
  tenant_state text, tenant_limits jsonb
)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  select k.tenant_id, k.id, k.scopes, k.platforms, k.expires_at, k.revoked_at, k.last_used_at,
         t.state, t.limits
    from api_keys k
    join tenants t on t.id = k.tenant_id
   where k.tenant_id = p_tenant_id
     and k.id = p_id
     and k.digest = p_digest
$$;
alter function find_api_key(uuid, uuid, bytea) owner to throughline_definer;
revoke execute on function find_api_key(uuid, uuid, bytea) from public;
grant execute on function find_api_key(uuid, uuid, bytea) to throughline_service;

-- Global, allow-listed: the nodes that run now, by the clock of Postgres. Nothing of tenants.
create table nodes (
  boot_id  uuid        constraint nodes_pkey primary key,
  addr     text,
  seen_at  timestamptz not null
);
grant select, insert, update, delete on nodes to throughline_service;
