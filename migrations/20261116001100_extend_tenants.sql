-- What a tenant decides about itself, and its end.
--
-- Settings are a document that the service checks; allowed origins stand apart because they are needed
-- with every credential. A tenant that is being deleted refuses every credential at once; its rows go
-- in batches, by a job that any node can take up again, and its own row goes last.
alter table tenants
  add column settings        jsonb  not null default '{}',
  add column allowed_origins text[] not null default '{}',
  drop constraint tenants_state_known,
  add constraint tenants_state_known check (state in ('active', 'suspended', 'deleting', 'operator'));
grant update (settings, allowed_origins) on tenants to throughline_service;

-- Whose key, and whose issuer: both answer with what the tenant allows its callers.
drop function find_api_key(uuid, uuid, bytea);
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

drop function find_issuers(uuid, text);
create function find_issuers(p_tenant_id uuid, p_iss text)
returns table (
  tenant_id uuid, name text, iss text, audience text, platform text, algorithm text,
  secret_enc bytea, jwks jsonb, jwks_url text, created_at timestamptz, updated_at timestamptz,
  tenant_state text, tenant_limits jsonb, allowed_origins text[]
)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  select i.tenant_id, i.name, i.iss, i.audience, i.platform, i.algorithm,
         i.secret_enc, i.jwks, i.jwks_url, i.created_at, i.updated_at,
         t.state, t.limits, t.allowed_origins
    from issuers i
    join tenants t on t.id = i.tenant_id
   where i.tenant_id = p_tenant_id
     and i.iss = p_iss
   order by i.name
$$;
alter function find_issuers(uuid, text) owner to throughline_definer;
revoke execute on function find_issuers(uuid, text) from public;
grant execute on function find_issuers(uuid, text) to throughline_service;

-- Lets the erasing function below delete from a table, and see what it deletes.
create function install_definer_erase(target regclass) returns void
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  if not exists (select 1 from pg_policy where polrelid = target and polname = 'definer_read') then
    perform install_definer_read(target);
  end if;
  execute format('create policy definer_erase on %s for delete to throughline_definer using (true)', target);
  execute format('grant delete on %s to throughline_definer', target);
end
$$;
revoke execute on function install_definer_erase(regclass) from public;

select install_definer_erase(t)
  from unnest(array['api_keys', 'idempotency', 'audit', 'audit_heads', 'usage_hourly',
                    'issuers', 'agents', 'identities', 'users']::regclass[]) as t;
grant delete on tenants, jobs to throughline_definer;
grant select on jobs to throughline_definer;

-- Deletes up to p_limit rows of a tenant that is being deleted, children before parents, and answers
-- how many. At 0 nothing of the tenant is left, its own row included. The service may not delete such
-- rows itself (the audit least of all): only this way, and only once the tenant's state says so.
create function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'identities', 'users', 'audit', 'audit_heads'] loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;
alter function erase_tenant(uuid, integer) owner to throughline_definer;
revoke execute on function erase_tenant(uuid, integer) from public;
grant execute on function erase_tenant(uuid, integer) to throughline_service;
