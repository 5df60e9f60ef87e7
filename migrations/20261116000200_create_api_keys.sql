-- A tenant's keys. The key's text carries tenant id and key id, so a look-up is one primary-key read;
-- only its SHA-256 is stored (192 random bits need no slow hash), and the service's role may not
-- even read that: it can ask find_api_key whether a digest is the right one.
create table api_keys (
  tenant_id     uuid        not null constraint api_keys_tenant_fkey references tenants (id),
  id            uuid        not null,
  digest        bytea       not null constraint api_keys_digest_length check (octet_length(digest) = 32),
  name          text        not null constraint api_keys_name_length check (char_length(name) between 1 and 100),
  scopes        text[]      not null constraint api_keys_scopes_known
                check (cardinality(scopes) > 0 and scopes <@ array['admin', 'bridge', 'chat', 'read']),
  platforms     text[]      not null,
  created_at    timestamptz not null,
  expires_at    timestamptz,
  revoked_at    timestamptz,
  last_used_at  timestamptz,
  constraint api_keys_pkey primary key (tenant_id, id),
  constraint api_keys_bridge_has_platforms check (('bridge' = any (scopes)) = (cardinality(platforms) > 0))
);
select install_tenant_policy('api_keys');
select install_definer_read('api_keys');
grant select (tenant_id, id, name, scopes, platforms, created_at, expires_at, revoked_at, last_used_at)
  on api_keys to throughline_service;
grant insert on api_keys to throughline_service;
grant update (revoked_at, last_used_at) on api_keys to throughline_service;

-- Who calls? Asked before any tenant is set, so it runs as the definer; it answers only to whoever
-- already holds the key's text, and with what binds every credential of the tenant.
create function find_api_key(p_tenant_id uuid, p_id uuid, p_digest bytea)
returns table (
  tenant_id uuid, id uuid, scopes text[], platforms text[],
  expires_at timestamptz, revoked_at timestamptz, last_used_at timestamptz,
  tenant_state text, tenant_limits jsonb, allowed_origins text[]
)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  select k.tenant_id, k.id, k.scopes, k.platforms, k.expires_at, k.revoked_at, k.last_used_at,
         t.state, t.limits, t.allowed_origins
    from api_keys k
    join tenants t on t.id = k.tenant_id
   where k.tenant_id = p_tenant_id
     and k.id = p_id
     and k.digest = p_digest
$$;
alter function find_api_key(uuid, uuid, bytea) owner to throughline_definer;
revoke execute on function find_api_key(uuid, uuid, bytea) from public;
grant execute on function find_api_key(uuid, uuid, bytea) to throughline_service;
