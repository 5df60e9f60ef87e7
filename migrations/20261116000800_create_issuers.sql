-- Who may sign user tokens for a tenant, and for which platform. A platform is vouched for by one
-- issuer or by bridge keys, never both; the first half of that rule is the unique key below, the
-- second is judged under the tenant's row lock.
create table issuers (
  tenant_id   uuid        not null constraint issuers_tenant_fkey references tenants (id),
  name        text        not null constraint issuers_name_length check (char_length(name) between 1 and 64),
  iss         text        not null,
  audience    text,
  platform    text        not null,
  algorithm   text        not null constraint issuers_algorithm_known
              check (algorithm in ('HS256', 'RS256', 'ES256', 'EdDSA')),
  -- Exactly one of the three; the secret is sealed for this row.
  secret_enc  bytea,
  jwks        jsonb,
  jwks_url    text,
  created_at  timestamptz not null,
  updated_at  timestamptz not null,
  constraint issuers_pkey primary key (tenant_id, name),
  constraint issuers_platform_once unique (tenant_id, platform),
  constraint issuers_iss_once unique nulls not distinct (tenant_id, iss, audience),
  constraint issuers_one_key_source check (num_nonnulls(secret_enc, jwks, jwks_url) = 1),
  constraint issuers_secret_is_hs256 check ((algorithm = 'HS256') = (secret_enc is not null))
);
select install_tenant_policy('issuers');
select install_definer_read('issuers');
grant select, insert, update, delete on issuers to throughline_service;

-- Whose token is this? Asked before the tenant is entered: the token names tenant and issuer, and
-- nothing of it is believed yet.
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
